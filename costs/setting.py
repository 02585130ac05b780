"""What a record depends on, and what follows from it: one rank's part of the model and its inputs,
on tensors that have only shapes, with groups that communicate with nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from costs.as_on_gpu import DEVICE
from costs.collectives import silent_group
from costs.routing import Routing
from model.attention import attentions_of
from model.config import ModelConfig
from model.documents import Documents
from model.experts import Experts
from model.kernels.attention import OPERATORS
from model.kernels.backend import exact
from model.router import routers_of
from model.transformer import Batch, Transformer, hidden_shape
from parallel.activation import Mode, gathers_again, wrap_blocks
from parallel.context import ContextParallel
from parallel.expert import ExpertParallel
from parallel.layer import TensorParallel


@dataclass(frozen=True)
class Setting:
    """All that a record depends on, apart from the unit."""

    model: ModelConfig
    seq_len: int
    tp: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = True
    tp_pieces: int = 1
    micro_batch_size: int = 1
    document_mask: bool = False
    activation_checkpointing: Mode = "none"
    dtype: torch.dtype = torch.bfloat16
    cp: int = 1
    # Rank 0 needs as much as any: all have equally many scores to compute, but the last has one
    # chunk of queries where the others have two. (Of a window, later chunks have a little more.)
    cp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    imbalance: float = 1.0  # of the rows that experts receive (routing.py)
    notes_logits: bool = False  # as a step does that limits them (training/qk_clip.py)

    @property
    def tokens(self) -> int:
        """The tokens of each sequence on one cp rank."""
        return context(self).local_length(self.seq_len)


def hidden(setting: Setting) -> Tensor:
    """The hidden states that pass from unit to unit."""
    axes = tensor(setting), context(setting)
    shape = hidden_shape(setting.model, setting.seq_len, setting.micro_batch_size, *axes)
    return torch.empty(shape, dtype=setting.dtype, device=DEVICE)


def tensor(setting: Setting) -> TensorParallel:
    """The tp axis."""
    group, cut = silent_group("tp", setting.tp_rank, setting.tp), setting.sequence_parallel
    return TensorParallel(setting.tp, setting.tp_rank, group, None, cut, setting.tp_pieces)


def context(setting: Setting) -> ContextParallel:
    """The cp axis."""
    group = silent_group("cp", setting.cp_rank, setting.cp)
    again = gathers_again(setting.activation_checkpointing)
    return ContextParallel(setting.cp, setting.cp_rank, group, gathers_again=again)


def batch_of(setting: Setting) -> Batch:
    """A micro-batch."""
    shape = (setting.tokens, setting.micro_batch_size)
    tokens = torch.empty(shape, dtype=torch.int64, device=DEVICE)
    loss_scale = torch.empty((), dtype=exact(setting.dtype), device=DEVICE)
    if not setting.document_mask:
        return Batch(tokens, tokens, tokens[:, :1], loss_scale)
    # one document per sequence; the number of documents makes no difference
    bounds = torch.empty(shape[1] + 1, dtype=torch.int32, device=DEVICE)
    documents = [
        Documents(bounds, bounds, (0,) * shape[1], (len(part), part.stop))
        for part in context(setting).chunks(setting.seq_len)
    ]
    return Batch(tokens, tokens, tokens, loss_scale, documents)


def tensors_in(batch: Batch) -> list[Tensor]:
    return [value for value in vars(batch).values() if isinstance(value, Tensor)]


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
