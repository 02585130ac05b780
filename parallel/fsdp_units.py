"""FSDP's units: which modules are gathered and reduced together, over which view of the mesh, and
along which dimension of their weights.

    embedding │ experts of block 0 │ the rest of block 0 │ experts of block 1 │ … │ norm and head

A weight says whether it is of experts (parameter.py), and the mesh has the view that shards it. All
weights of a unit have one view, so experts are a unit inside their block's unit.
"""

from collections.abc import Sequence
from functools import partial

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
from torch.distributed.tensor import Shard

from parallel.data import fsdp_modules
from parallel.layer import Layer
from parallel.mesh import Mesh
from parallel.parameter import weights_of
from parallel.placement import local_part

MANY = 1000  # more than a stage has units


def shard(
    stage: nn.Module,
    units: Sequence[list[nn.Module]],
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    offload: str,
    input_buffers: int = 1,
) -> None:
    """Apply `fully_shard` to each of `units`, to the units inside of it before, and then to `stage`
    itself, each over the 2-D view of the mesh for its weights (`Mesh.fsdp`).

    Parameters stay in their own dtype (the master weights); forward and backward see them in
    `compute_dtype`, and gradients are reduced in `reduce_dtype`.

    input_buffers: of reductions, as `input_buffers` returns it.

    If every view is one rank (`shares_weights`), and weights are not offloaded, the stage is left
    as it is (whole.py).
    """
    if offload == "none" and not shares_weights(mesh):
        return
    # FSDP must not cast inputs: hidden states already have the compute dtype, and rotary angles
    # must stay in float32.
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    # pinned memory cannot be that of a file
    pins = offload == "host" and torch.cuda.is_available() and mesh.device == "cuda"
    policy = OffloadPolicy() if offload == "none" else CPUOffloadPolicy(pin_memory=pins)
    nested = [(inner_units(unit), unit) for unit in units]
    in_order = [unit for pair in nested for unit in pair if unit]
    for unit in (*in_order, [stage]):
        over = view_of(unit, mesh)
        fully_shard(
            unit,
            mesh=over,
            shard_placement_fn=partial(_placement, over.size(-1)),
            mp_policy=precision,
            offload_policy=policy,
        )
    for inner, outer in nested:
        # Routing makes the host wait in the middle of a block. Experts are gathered with their
        # block: if they were gathered only after the wait, the device would wait for them.
        if inner:
            _fsdp(outer[0]).set_modules_to_forward_prefetch([_fsdp(inner[0])])
    if units:
        # In backward, while one unit computes, FSDP prefetches the unit that ran before it in
        # forward. For the first unit this is the last unit of the previous micro-batch, which would
        # be gathered needlessly. The first unit prefetches only itself, so nothing is gathered.
        first = _fsdp(in_order[0][0])
        first.set_modules_to_backward_prefetch([first])
    for module in fsdp_modules(stage):
        # A plain sum needs both calls: by default FSDP divides by the number of ranks, and it
        # implements any other factor by pre- and post-division unless a sum is forced.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if input_buffers > 1:
            module.set_reduce_scatter_max_input_buffers(input_buffers)


def input_buffers(zero_stage: int) -> int:
    """How many reductions of a backward may run, or wait for the link, while it goes on: FSDP keeps
    the input of each. With zero_stage 0 and 1, a step has one backward with reductions, and whole
    gradients that are longer alive than these inputs: so there is room for all. Before torch 2.13
    FSDP keeps one."""
    has_more = hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers")
    return MANY if has_more and zero_stage < 2 else 1


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def shares_weights(mesh: Mesh) -> bool:
    """Whether FSDP shards or replicates weights: some view has several ranks. The answer is the
    same for all stages, also for one that has no experts."""
    return any(view.size() > 1 for view in mesh.fsdp.values())


def view_of(unit: Sequence[nn.Module], mesh: Mesh) -> DeviceMesh:
    """The mesh view to shard the unit's weights over. Weights of inner units are sharded already
    and do not count; if none are left, the unit is not of experts."""
    weights = [each for module in unit for each in weights_of(module)]
    left = [each for each in weights if each.sharded.device_mesh.ndim == 1]  # only tp, or ep
    kinds = {each.spec.is_expert for each in left} or {False}
    assert len(kinds) == 1, "some weights of one FSDP unit are of experts, and others are not"
    return mesh.fsdp[kinds.pop()]


def inner_units(unit: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules inside of `unit` whose own layers have weights of experts."""
    return [module for outer in unit for module in outer.modules() if _has_experts(module)]


def _has_experts(module: nn.Module) -> bool:
    return any(isinstance(each, Layer) and each.spec.is_expert for each in module.children())


def sharded_dimension(shape: Sequence[int], ranks: int) -> int:
    """The dimension over which FSDP shards a weight, by its shape on this rank. Of experts
    [X, out, in] it is the second, if there are fewer of them than ranks."""
    return 1 if len(shape) == 3 and shape[0] < ranks else 0


def _placement(ranks: int, parameter: nn.Parameter) -> Shard:
    return Shard(sharded_dimension(local_part(parameter).shape, ranks))
