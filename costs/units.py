"""Records the units of the model: the embedding, a block of each kind, the norm with the head.

    block = unit(Setting(model, seq_len=8192, tp=8), kind_of(model, layer=0))
    block.phases()["forward"].product_flops      FLOPs of matrix products in forward
    block.phases()["backward"].effect.height     the peak of memory in backward, in bytes above its
                                                 beginning

Units are what FSDP gathers, what a pipeline's stages consist of, and what activation checkpointing
wraps. A record covers one micro-batch's forward and backward, or, where a schedule splits backward,
forward, input gradients and weight gradients. Tensors that pass from one unit to the next are
counted once: in forward a unit's record begins with its input and ends with its output; in backward
it begins with the output's gradient, which autograd owns, and ends with the input's gradient.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from costs.as_on_gpu import DEVICE, AsOnGpu
from costs.recorder import Phase, Piece, Recorder
from costs.setting import Setting, batch_of, build_stage, hidden, routing, state_of, tensors_in
from errors import UserError
from model.config import ModelConfig
from model.positions import BatchPositions
from model.transformer import Block, Transformer
from parallel.fsdp_units import inner_units
from parallel.layer import gradients_of, layers_of
from parallel.memory import ACTIVATIONS, DEFERRED, GRADIENTS, TEMPORARY
from parallel.parameter import WeightSpec, weights_of
from parallel.weight_gradient import Job, Place, deferring, run_jobs

EMBEDDING, HEAD = "embedding", "head"  # units; a block's name is its kind


@dataclass(frozen=True)
class LocalWeight:
    """One rank's shard of a weight: over tp, or of experts over ep."""

    spec: WeightSpec
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Sums(NamedTuple):
    """How gradients are summed over micro-batches (parallel/weight_gradient.py)."""

    dtype: torch.dtype
    begun: bool  # the sums have gradients of an earlier micro-batch


@dataclass(frozen=True, eq=False)
class Unit:
    """The records of one unit."""

    setting: Setting
    name: str
    weights: tuple[LocalWeight, ...]
    hidden_bytes: int  # of the hidden states that pass from unit to unit
    # by `split` and `sums`; and the phases also by `first` and `last`
    _recorders: dict[Any, Recorder] = field(default_factory=dict, init=False, repr=False)
    _phases: dict[Any, dict[str, Phase]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def numel(self) -> int:
        """Parameters on the rank, before FSDP shards them."""
        return sum(weight.numel for weight in self.weights)

    def phases(
        self,
        split: bool = False,
        sums: Sums | None = None,
        first: bool = False,
        last: bool = False,
    ) -> dict[str, Phase]:
        """What one micro-batch costs: forward and backward, or if `split` forward, input and
        weight. Without `sums`, its gradients stay in the dtype of the weights. `first`: the unit is
        the first of a stage that receives its input x; `last`: it is the last of a stage that
        receives the gradient dy of its output. The pipeline's runner holds both until backward has
        ended. Raises CannotRecord."""
        key = split, sums, first, last
        if key not in self._phases:
            if key[:2] not in self._recorders:
                self._recorders[key[:2]] = _record(self.setting, self.name, split, sums)
            holding = ["x"] * first + ["dy"] * last
            self._phases[key] = self._recorders[key[:2]].phases(holding)
        return self._phases[key]


def kind_of(model: ModelConfig, layer: int) -> str:
    """A block's name as a unit: its kinds of attention and of feed-forward, which determine its
    structure."""
    return f"{model.attention_of(layer)} {model.feed_forward_of(layer)}"


def kinds_of_layers(model: ModelConfig) -> list[str]:
    """The name of every layer's block as a unit."""
    return [kind_of(model, layer) for layer in range(model.num_layers)]


@lru_cache(maxsize=4096)
def unit(setting: Setting, name: str) -> Unit:
    """The unit called EMBEDDING, HEAD or a kind of block. It is recorded when its records are first
    used."""
    if name in (EMBEDDING, HEAD) and setting.activation_checkpointing != "none":
        return unit(replace(setting, activation_checkpointing="none"), name)  # only blocks have it
    weights = weights_of(_stage(setting, [name]))
    local = tuple(LocalWeight(each.spec, tuple(each.parameter.shape)) for each in weights)
    return Unit(setting, name, local, hidden(setting).nbytes)


@lru_cache(maxsize=4096)
def position_bytes(setting: Setting, kinds: frozenset[str]) -> int:
    """Bytes that a stage with blocks of these kinds derives from positions, once for all blocks."""
    stage, batch = _stage(setting, sorted(kinds)), batch_of(setting)
    recorder = Recorder(lambda piece: None)
    recorder.leave_out(*stage.parameters(), *tensors_in(batch))
    with AsOnGpu(), recorder:
        positions = BatchPositions(batch.positions, batch.documents, setting.dtype, stage.cp)
        inputs = []
        for block in stage.blocks.values():
            assert isinstance(block, Block)
            inputs.append(block.attention.inputs(positions))
        held = recorder.bytes_held
    del inputs
    return held


def _stage(setting: Setting, names: Iterable[str]) -> Transformer:
    """A pipeline stage that consists of these units."""
    kinds = kinds_of_layers(setting.model)
    layers = [kinds.index(name) for name in names if name in kinds]
    return build_stage(setting, layers, EMBEDDING in names, HEAD in names)


class End(torch.autograd.Function):
    """Allocates the gradient of the unit's output in backward, as its neighbour would. Only
    autograd then holds it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, sent: Callable[[Tensor], None]) -> Tensor:
        ctx.shape, ctx.dtype, ctx.sent = y.shape, y.dtype, sent
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        dy = torch.empty(ctx.shape, dtype=ctx.dtype, device=DEVICE)
        ctx.sent(dy)
        return dy, None


class CannotRecord(UserError):
    """A unit does not run on meta tensors. Training does not need it to."""


def _record(setting: Setting, name: str, split: bool, sums: Sums | None) -> Recorder:
    """Record one micro-batch's forward and backward of a unit."""
    try:
        return _run(setting, name, split, sums)
    except Exception as error:
        why = "does not run on meta tensors (shapes without data), so its costs are unknown "
        why += f"({type(error).__name__}: {error})"
        remedy = "do not read values out of tensors, and give each custom op a fake implementation"
        raise CannotRecord("the unit", name, why, remedy) from error


def _run(setting: Setting, name: str, split: bool, sums: Sums | None) -> Recorder:
    stage, batch = _stage(setting, [name]), batch_of(setting)
    places = _sum_gradients(stage, sums)
    gradients: list[Piece] = []

    def category_of(piece: Piece) -> str | None:
        if piece in flow.values():
            return ACTIVATIONS if piece in (flow.get("x"), flow.get("y")) else TEMPORARY
        if piece.born_in < 0 or (piece.born_in == 0 and not piece.of_unit):
            return None
        if piece.died_in == piece.born_in:
            return TEMPORARY
        if piece.born_in == 0:
            return ACTIVATIONS
        return GRADIENTS if piece in gradients else DEFERRED

    def sent(dy: Tensor) -> None:
        recorder.passes("dy", dy)
        recorder.begin("input" if split else "backward")

    def received(dx: Tensor) -> None:
        recorder.passes("dx", dx)
        recorder.end()

    def hand_over() -> None:
        """Note the sums that exist now, and those that forward has made as no longer its own."""
        for total in [] if begun else [each.total for each in places]:
            if total is not None and (piece := recorder.piece(total)) not in gradients:
                gradients.append(piece)
                if piece.born_in == 0:
                    recorder.hand_over(piece, GRADIENTS)

    recorder = Recorder(category_of)
    flow = recorder.flow
    leaf = hidden(setting).requires_grad_()
    begun = [each.total for each in places if each.total is not None]
    recorder.leave_out(leaf, *state_of(stage), *tensors_in(batch), *begun)
    later: AbstractContextManager[list[Job]]
    later = deferring(gradients_of(stage)) if split else nullcontext([])
    _leave_out_positions(stage, recorder)
    _mark_experts(stage, recorder)
    with torch.enable_grad(), AsOnGpu(), routing(setting), recorder:
        x = None
        if name != EMBEDDING:
            x = leaf.clone()  # which the unit before would have allocated
            x.register_hook(received)
            recorder.passes("x", x)
        with recorder.phase("forward"):
            y = stage(x, batch)
            del x
        hand_over()  # what forward has summed
        if name == HEAD:
            end = get_gradient_edge(y)
            recorder.begin("input" if split else "backward")
        else:
            recorder.passes("y", y)
            end = get_gradient_edge(End.apply(y, sent))
        del y
        with later as jobs:
            torch.autograd.backward(end)
        del end  # and with it what operations keep until their graph is freed
        recorder.end()
        if split:
            with recorder.phase("weight"):
                run_jobs(jobs)
        hand_over()
        assert all(each.total is not None for each in places)
    return recorder


def _sum_gradients(stage: Transformer, sums: Sums | None) -> list[Place]:
    """Let each layer put its gradient into a place of its own, or with `sums` add it there; returns
    the places."""
    places = []
    for layer in layers_of(stage):
        dtype = layer.weight.dtype if sums is None else sums.dtype
        begun = sums is not None and sums.begun
        places.append(Place(torch.empty_like(layer.weight, dtype=dtype) if begun else None))
        layer.gradient.sum_in(places[-1], dtype, adds=sums is not None)
    return places


def _leave_out_positions(stage: Transformer, recorder: Recorder) -> None:
    """Do not count what a stage of blocks does in forward outside of them, once for all: its memory
    is `position_bytes`, and its time, some ten small operations, is in no plan."""

    def inside(is_inside: bool) -> None:
        recorder.of_unit = is_inside

    for block in stage.blocks.values():
        inside(False)
        block.register_forward_pre_hook(lambda *_: inside(True))
        # recomputation may end a forward early, with an exception
        block.register_forward_hook(lambda *_: inside(False), always_call=True)


def _mark_experts(stage: nn.Module, recorder: Recorder) -> None:
    """Mark when FSDP treats the experts of a block, which are a unit of their own: in forward,
    before and after them; in backward, before what is recomputed of them (or where it would be),
    before their backward and after it."""

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not recorder.marks:
            recorder.mark()
        x = args[0].view_as(args[0])
        x.register_hook(lambda _: recorder.mark())
        return x, *args[1:]

    def leave(_: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        recorder.mark()
        y.register_hook(begin_backward)

    def begin_backward(_: Tensor) -> None:
        while recorder.marks < 2:
            recorder.mark()

    for module in inner_units([stage]):
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
