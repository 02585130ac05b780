"""Builds what is recorded: one rank's part of the model, on tensors without data, with groups that
communicate with nothing."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from costs.as_on_gpu import DEVICE
from costs.collectives import silent_group
from costs.routing import Routing
from costs.setting import Setting, context
from model.experts import Experts
from model.kernels.attention import OPERATORS
from model.kernels.backend import exact
from model.router import Account, routers_of
from model.transformer import Transformer
from parallel.activation import wrap_blocks
from parallel.expert import ExpertParallel
from parallel.layer import TensorParallel


def build_stage(setting: Setting, layers: Iterable[int], first: bool, last: bool) -> Transformer:
    """A pipeline stage with these layers, and the embedding if `first` and the head if `last`."""
    group = silent_group("tp", setting.tp_rank, setting.tp)
    cut, pieces = setting.sequence_parallel, setting.tp_pieces
    tp = TensorParallel(setting.tp, setting.tp_rank, cut, None, group, pieces)
    cp, ep = context(setting), silent_group("ep", setting.ep_rank, setting.ep)
    sequence, parts = (cp.group, group), setting.cp * setting.tp
    experts = ExpertParallel(setting.ep, setting.ep_rank, None, ep, sequence, parts)
    stage = Transformer(setting.model, layers, first, last, tp, cp, experts).to(setting.dtype)
    for _, router in routers_of(stage):  # as in a training run (training/balance.py)
        counts = torch.zeros(router.num_experts, dtype=torch.int64, device=DEVICE)
        losses = torch.zeros(2, dtype=exact(setting.dtype), device=DEVICE)
        router.account = Account(counts, losses, global_sequences=1)
        router.bias = torch.zeros(router.num_experts, device=DEVICE) if router.has_bias else None
    mode = setting.activation_checkpointing
    wrap_blocks(stage.blocks.values(), mode, False, setting.tp, OPERATORS)
    return stage


def routing(setting: Setting) -> Routing:
    """The numbers of rows that routers find."""
    experts = setting.model.find(Experts) or Experts()  # of none: no rows
    rows = setting.tokens_of_rank * experts.per_token
    return Routing(rows, experts.count, setting.ep, setting.ep_rank, setting.imbalance)


def state_of(stage: Transformer) -> Iterator[Tensor]:
    """The tensors of a stage that outlast a micro-batch: parameters, and what routers count."""
    yield from stage.parameters()
    for _, router in routers_of(stage):
        assert router.account is not None
        yield from (router.account.counts, router.account.losses)
        if router.bias is not None:
            yield router.bias
