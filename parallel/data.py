"""Data parallelism: FSDP2 over dp_shard, whole replicas over dp_replicate, and what `zero_stage`
means.

What FSDP sends, for each unit. A unit is a block; the embedding is one, the final norm and the head
are another. (Or a whole stage, with `fsdp_unit: stage`.) M: micro-batches of a step.

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

A group of one rank sends nothing. Between micro-batches a rank holds whole weights up to zero_stage
2 and whole gradients with 0 and 1; between steps weights and moments are sharded in all. (ZeRO:
Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; hybrid sharding: Zhao et al. 2023,
https://arxiv.org/abs/2304.11277.) zero_stage 2 trades M − 1 more reduce-scatters for gradients of 1
/ dp_shard the size; 3 trades 2 M − 1 more gathers for weights of 1 / dp_shard the size.
`FSDPSwitches` turns FSDP's switches, and tests/test_collectives.py holds the table to what is sent.

A weight leads two lives. The optimizer, the checkpoint and the norm see one part of it; forward and
backward see more:

    between steps  DTensor on (dp_replicate, dp_shard, tp)   master dtype   p, p.grad, moments
        │ gather over dp_shard                ▲ reduce-scatter over dp_shard, all-reduce over
        ▼                                     │ dp_replicate
    in a forward   DTensor on (tp)            │              compute dtype  `local_weight` opens it

Every reduction is a plain sum: the loss is divided by the number of target tokens of the global
batch before backward, so no mean is ever taken of means.
"""

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from parallel.mesh import Mesh
from parallel.parameter import weights_of


def shard(
    stage: nn.Module,
    units: Sequence[list[nn.Module]],
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
) -> None:
    """Apply `fully_shard` to each of `units` and then to `stage` itself, each over the view of the
    mesh that its weights name: the 2-D mesh (dp_replicate, dp_shard).

    Parameters stay in their own dtype (the master weights); forward and backward see them in
    `compute_dtype`, and gradients are reduced in `reduce_dtype`.
    """
    # Inputs are cast by nobody: hidden states already have the compute dtype, rotary angles must
    # keep float32.
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    on_gpu = torch.cuda.is_available() and mesh.device == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy()
    for unit in (*units, [stage]):
        over = view_of(unit, mesh)
        fully_shard(unit, mesh=over, mp_policy=precision, offload_policy=offload)
    if units:
        # In backward FSDP gathers, while one unit computes, the unit that ran before it in forward.
        # What ran before the first unit was the last one, of the previous micro-batch, and it would
        # be gathered in vain. Told to prefetch itself, the first unit prefetches nothing.
        first = units[0][0]
        assert isinstance(first, FSDPModule)
        first.set_modules_to_backward_prefetch([first])
    for module in fsdp_modules(stage):
        # Both are needed for a plain sum: FSDP divides by the number of ranks unless told a factor,
        # and it implements a factor other than the number of ranks by pre- and post-division unless
        # told to sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def view_of(unit: Sequence[nn.Module], mesh: Mesh) -> DeviceMesh:
    """The view that the unit's weights are to be sharded over, but for those of units inside it,
    which are sharded already; `fsdp` where none are left."""
    weights = [each for module in unit for each in weights_of(module)]
    left = [
        each
        for each in weights
        if "dp_shard" not in (each.sharded.device_mesh.mesh_dim_names or ())
    ]
    names = {each.spec.sharded_over for each in left} or {"fsdp"}
    assert len(names) == 1, f"one unit of FSDP has weights of several views: {sorted(names)}"
    view = getattr(mesh, names.pop())
    assert isinstance(view, DeviceMesh)
    return view


def fsdp_modules(stage: nn.Module) -> list[FSDPModule]:
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


class FSDPSwitches:
    """Turns FSDP2's switches around the forwards and backwards of one step, for the table at the
    top of this file."""

    def __init__(self, stage: int) -> None:
        self.reduce_each_microbatch = stage >= 2
        self.reshard_weights = stage == 3
        # Each of FSDP2's switches walks all modules of a stage to find its units; those are few,
        # and do not change.
        self._units = cache(fsdp_modules)

    def begin_step(self, module: nn.Module) -> None:
        """Before a stage's first forward of a step."""
        assert isinstance(module, FSDPModule)
        module.set_is_last_backward(False)
        self._reduce(module, self.reduce_each_microbatch)
        for unit in self._units(module):
            unit.set_reshard_after_backward(self.reshard_weights, recurse=False)
            unit.set_reshard_after_forward(self.reshard_weights, recurse=False)

    def before_backward(self, module: nn.Module, completes: bool, last: bool) -> None:
        """Before a backward. It `completes` the gradients of its micro-batch, or weight gradients
        are to follow; the `last` completes those of the step. Forgetting the last is silent: FSDP
        would keep every gradient for a later backward and the optimizer would find none
        (`check_reduced` finds out)."""
        if last:
            self._complete(module)
        elif self.reduce_each_microbatch:
            self._reduce(module, completes)

    def after_weight_gradients(self, module: nn.Module, last: bool) -> None:
        """After weight gradients were formed outside of a backward: what FSDP does at the end of
        one. It moves gradients to the dtype they are summed in, and reduces them where `zero_stage`
        says so, or at the `last`."""
        assert isinstance(module, FSDPModule)
        if last:
            self._complete(module)
        elif self.reduce_each_microbatch:
            self._reduce(module, True)
        # torch.distributed.pipelining calls this private hook for the same purpose, in 2.11 as in
        # 2.13.
        module._get_fsdp_state()._root_post_backward_final_callback()

    def _reduce(self, module: nn.Module, over_shards: bool) -> None:
        for unit in self._units(module):
            # This also switches the all-reduce over replicas, which belongs only to the last
            # backward: switched off again.
            unit.set_requires_gradient_sync(over_shards, recurse=False)
            unit.set_requires_all_reduce(False, recurse=False)

    def _complete(self, module: nn.Module) -> None:
        assert isinstance(module, FSDPModule)
        module.set_is_last_backward(True)
        for unit in self._units(module):
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_requires_all_reduce(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)


def reshard(module: nn.Module) -> None:
    """Free a stage's gathered weights, after forwards that no backward follows."""
    for unit in fsdp_modules(module):
        unit.reshard()


def check_reduced(parameters: Iterable[nn.Parameter]) -> None:
    """Assert that backward left every parameter a reduced, sharded gradient."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or any(
            placement.is_partial() for placement in gradient.placements
        ):
            raise AssertionError(
                "a parameter has no reduced gradient after the step: no backward was its last"
            )
