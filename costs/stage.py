"""Builds what is recorded: one rank's part of the model, on tensors without data, with groups that
communicate with nothing."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from costs.as_on_gpu import DEVICE
from costs.collectives import silent_group
from costs.routing import Routing
from costs.setting import Setting, context, hidden, tensor
from model.attention import attentions_of
from model.experts import Experts
from model.kernels.attention import OPERATORS
from model.kernels.backend import exact
from model.router import routers_of
from model.transformer import Transformer
from parallel.activation import wrap_blocks
from parallel.expert import ExpertParallel


def build_stage(setting: Setting, layers: Iterable[int], first: bool, last: bool) -> Transformer:
    """A pipeline stage with these layers, and the embedding if `first` and the head if `last`."""
    tp, cp = tensor(setting), context(setting)
    group, parts = silent_group("ep", setting.ep_rank, setting.ep), setting.cp * setting.tp
    ep = ExpertParallel(setting.ep, setting.ep_rank, group, None, (cp.group, tp.group), parts)
    stage = Transformer(setting.model, layers, first, last, tp, cp, ep).to(setting.dtype)
    for _, router in routers_of(stage):  # as in a training run (training/balance.py)
        router.start_to_count(DEVICE, exact(setting.dtype), global_sequences=1)
    if setting.notes_logits:
        for _, attention in attentions_of(stage):
            attention.watch_logits(DEVICE, exact(setting.dtype)).begin(wanted=True)
    mode = setting.activation_checkpointing
    wrap_blocks(stage.blocks.values(), mode, False, setting.tp, OPERATORS)
    return stage


def routing(setting: Setting) -> Routing:
    """The numbers of rows that a dispatch reads."""
    experts = setting.model.find(Experts) or Experts()  # without experts, nothing asks
    positions, sequences, _ = hidden(setting).shape  # in the residual stream of one rank
    rows = positions * sequences * experts.per_token
    return Routing(rows, setting.ep, setting.ep_rank, setting.imbalance)


def state_of(stage: Transformer) -> Iterator[Tensor]:
    """The tensors of a stage that outlast a micro-batch: parameters, what routers count, and the
    largest logits."""
    yield from stage.parameters()
    for _, router in routers_of(stage):
        assert router.load is not None
        yield from (router.load.counts, router.load.losses)
        if router.bias is not None:
            yield router.bias
    yield from (each.largest.found for _, each in attentions_of(stage) if each.largest)
