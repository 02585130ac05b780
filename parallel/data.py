"""Data parallelism: FSDP2 over dp_shard, replicas of the sharded groups over dp_replicate, and the
meaning of `zero_stage`.

The table shows what FSDP sends for each unit (fsdp_units.py). Each block is a unit, the embedding
is one, and the final norm and the head together are one. (With `fsdp_unit: stage` a whole stage is
one unit.) Experts are a unit of their own, for which the axes are efsdp and ep_replicate. M is the
number of micro-batches in a step.

| zero_stage | what        | collective               | dtype   | when, in a step                |
|------------|-------------|--------------------------|---------|--------------------------------|
| 0          | nothing     | (dp_shard = 1)           |         |                                |
| 1          | weights     | all-gather, dp_shard     | compute | once, in the first forward     |
|            | gradients   | reduce-scatter, dp_shard | reduce  | once, in the last backward     |
| 2          | weights     | all-gather, dp_shard     | compute | once, in the first forward     |
|            | gradients   | reduce-scatter, dp_shard | reduce  | M times, in each backward      |
| 3          | weights     | all-gather, dp_shard     | compute | 2 M times, before each forward |
|            |             |                          |         | and each backward              |
|            | gradients   | reduce-scatter, dp_shard | reduce  | M times, in each backward      |
| all        | sharded     | all-reduce, dp_replicate | reduce  | once, in the last backward     |
|            | gradients   |                          |         |                                |

Until the all-reduce, FSDP adds up sharded gradients in the reduce dtype; without replicas, and if
that is narrower than the master's, each micro-batch's are converted and added to `p.grad` instead.
A group of one rank sends nothing. If all groups have one rank, FSDP is used only to offload
weights, else whole.py takes its place. Between micro-batches a rank holds whole weights with
zero_stage 0 to 2, and whole gradients with 0 and 1; between steps, weights and moments are sharded
with every zero_stage. (ZeRO: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; hybrid
sharding: Zhao et al. 2023, https://arxiv.org/abs/2304.11277.) With zero_stage 2 and 3 the gradients
of each micro-batch are rounded to the compute dtype. `FSDPSwitches` sets FSDP's switches
accordingly, and tests/parallel/test_collectives.py checks the table against what is sent.

Each weight exists in two forms. The optimizer, checkpoints and the gradient norm see this rank's
shard; forward and backward see the weight gathered over dp_shard:

    between steps  DTensor on (dp_replicate, dp_shard, tp)   master dtype   p, p.grad, moments
        │ gather over dp_shard                ▲ reduce-scatter over dp_shard, all-reduce over
        ▼                                     │ dp_replicate
    in a forward   DTensor on (tp)            │              compute dtype  see `local_weight`

Every reduction is a plain sum (training/step.py).
"""

from collections.abc import Collection, Iterable
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from parallel.disk import DiskMemory, aligned
from parallel.layer import Layer
from parallel.placement import as_dtensor_like, local_part
from parallel.weight_gradient import Place, adds_to_gradients, sum_dtype
from parallel.whole import WholeWeights


def fsdp_modules(stage: nn.Module) -> list[FSDPModule]:
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def _fsdp_groups(stage: nn.Module) -> list[FSDPParamGroup]:
    """FSDP's objects for the units of a stage that have weights; modules of one unit share one. In
    torch 2.11 to 2.13 only private attributes give access."""
    found = (module._get_fsdp_state()._fsdp_param_group for module in fsdp_modules(stage))
    return [*dict.fromkeys(group for group in found if group is not None)]


def fsdp_partial_sums(stage: nn.Module) -> list[Tensor | None]:
    """The gradients that FSDP has reduced over dp_shard, and not yet over dp_replicate."""
    return [group._partial_reduce_output for group in _fsdp_groups(stage)]


def _adds_to_gradients(unit: FSDPModule, reduce: torch.dtype) -> bool:
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return False
    weight: Any = group.fsdp_params[0].sharded_param  # a DTensor
    return adds_to_gradients(weight.device_mesh.size(0), reduce, weight.dtype)


def allocate_on_disk(stage: nn.Module, folder: str) -> None:
    """Give a stage on the meta device its memory: its weights a file in `folder`. Raises
    UserError."""
    weights = [weight for group in _fsdp_groups(stage) for weight in group.fsdp_params]
    file = DiskMemory(folder, sum(aligned(w._sharded_param_data.nbytes) for w in weights))
    parts: dict[int, Tensor] = {}
    for weight in weights:  # FSDP pads the shards of weights that are not divided evenly
        local, dim = local_part(weight.sharded_param), weight.fsdp_placement.dim
        padded = file.new_zeros(local, weight.padded_sharded_param_size)
        weight._sharded_param_data = padded.view(-1)
        parts[id(weight.sharded_param)] = padded.narrow(dim, 0, local.size(dim))

    def allocated(tensor: Tensor) -> Tensor:
        if id(tensor) in parts:
            return as_dtensor_like(parts[id(tensor)], tensor)
        return torch.empty_like(tensor, device="cpu")

    stage._apply(allocated)
    assert file.is_full


class FSDPPlace(Place):
    """Where FSDP looks for a sum of gradients: a private attribute (torch 2.11 to 2.13). What it
    finds there, it neither converts nor adds to; it takes it out when it reduces it."""

    def __init__(self, weight: FSDPParam) -> None:
        self._weight = weight

    @property
    def total(self) -> Tensor | None:
        total = self._weight.unsharded_accumulated_grad
        return None if total is None else local_part(total)

    @total.setter
    def total(self, total: Tensor | None) -> None:
        whole = None if total is None else as_dtensor_like(total, self._weight.unsharded_param)
        self._weight.unsharded_accumulated_grad = whole


class FSDPSwitches:
    """Sets FSDP2's switches before and after the forwards and backwards of a step, as the table at
    the top of this file requires. Told that a backward was a stage's last, FSDP lets the device
    wait for the stage's reductions, and with it the stages before, which need the gradient of its
    input. So it is told later: after the last backward of the rank's next stage, or at the end.
    """

    def __init__(
        self,
        stages: Iterable[nn.Module],
        zero_stage: int,
        compute: torch.dtype,
        reduce: torch.dtype,
    ) -> None:
        self.reduce_each_microbatch = zero_stage >= 2
        self.reshard_weights = zero_stage == 3
        # By default each FSDP2 setter walks all modules of a stage to find its units. The units are
        # few and do not change, so they are found once.
        self._units = cache(
            lambda stage: [(unit, _adds_to_gradients(unit, reduce)) for unit in fsdp_modules(stage)]
        )
        self._reducing: list[nn.Module] = []  # stages whose reductions were not waited for yet
        dtype = sum_dtype(False, zero_stage, compute, compute, reduce)
        groups = (group for stage in stages for group in _fsdp_groups(stage))
        for weight in chain.from_iterable(group.fsdp_params for group in groups):
            layer = weight._module_info.module
            assert isinstance(layer, Layer)
            layer.gradient.sum_in(FSDPPlace(weight), dtype or compute, adds=dtype is not None)

    def begin(self, module: nn.Module) -> None:
        """Before a stage's first forward of a step or of an evaluation."""
        self._switch(module, last=False)

    def before_backward(self, module: nn.Module, last: bool) -> None:
        """Before a backward, which as the `last` one completes the gradients of the step. (One that
        forms only input gradients leaves FSDP nothing to reduce.)"""
        # If none were the last, FSDP would keep every gradient for a later backward and the
        # optimizer would find none; `check_reduced` detects this.
        if last:
            self._switch(module, last=True)

    def after_backward(self, module: nn.Module, last: bool) -> None:
        """After a backward that completed the gradients of its micro-batch: FSDP's hooks have
        reduced them."""
        if last:
            self._wait()
            self._reducing = [module]

    def after_weight_gradients(self, module: nn.Module, last: bool) -> None:
        """Do what FSDP does at the end of a backward, after weight gradients were formed outside of
        one: reduce gradients if `zero_stage` requires it or this is the `last` of the step."""
        assert isinstance(module, FSDPModule)
        if last:
            self._switch(module, last=True)
        # torch.distributed.pipelining calls this private hook for the same purpose, in torch 2.11
        # and 2.13.
        module._get_fsdp_state()._root_post_backward_final_callback()
        self.after_backward(module, last)

    def _wait(self) -> None:
        """Let the device wait for reductions, and FSDP free what it held for them."""
        for module in self._reducing:
            assert isinstance(module, FSDPModule)
            module.set_is_last_backward(True)
            module._get_fsdp_state()._root_post_backward_final_callback()
        self._reducing = []

    def end(self, module: nn.Module) -> None:
        """At the end of a step or of an evaluation."""
        self._wait()
        for unit, _ in self._units(module):
            unit.reshard()

    def _switch(self, module: nn.Module, last: bool) -> None:
        """For the backwards that follow: whether the next is the `last` of the step."""
        assert isinstance(module, FSDPModule)
        module.set_is_last_backward(False)
        for unit, adds in self._units(module):
            unit.set_requires_gradient_sync(last or self.reduce_each_microbatch, recurse=False)
            # The call above sets the all-reduce over replicas too, which only the last backward
            # runs, or for which there is no other rank.
            unit.set_requires_all_reduce(last or adds, recurse=False)
            unit.set_reshard_after_backward(last or self.reshard_weights, recurse=False)
            unit.set_reshard_after_forward(self.reshard_weights, recurse=False)


DataParallel = FSDPSwitches | WholeWeights


def data_parallel(
    stages: Collection[nn.Module], zero_stage: int, compute: torch.dtype, reduce: torch.dtype
) -> DataParallel:
    """What gathers weights and reduces gradients of a rank's stages, as `shard` has left them."""
    if any(isinstance(stage, FSDPModule) for stage in stages):
        return FSDPSwitches(stages, zero_stage, compute, reduce)
    return WholeWeights(stages, compute, reduce)


def check_reduced(parameters: Iterable[nn.Parameter]) -> None:
    """Assert that every parameter has a reduced, sharded gradient after the last backward."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or any(p.is_partial() for p in gradient.placements):
            why = "a parameter has no reduced gradient: no backward was marked as the step's last"
            raise AssertionError(why)
