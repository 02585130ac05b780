"""A fake GPU, and a fake world in which this process is the only real rank.

Tensors have shapes and dtypes but no memory (costs/as_on_gpu.py). Also replaced are

    streams and events of FSDP  by objects that do nothing; FSDP holds its buffers as on a GPU
    collectives                 by torch's fake process group, without peers, in which no wait takes
                                time
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from costs.as_on_gpu import DEVICE, AsOnGpu
from parallel.axes import MeshSizes
from parallel.mesh import Mesh, build_mesh


class _Event:
    """An event as FSDP records it and waits for it, on a device that is always ready."""

    def record(self, *_: Any) -> "_Event":
        return self

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self, priority: int = 0) -> None: ...

    def wait_stream(self, stream: "_Stream") -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _DeviceModule:
    """Takes the place of `torch.cuda` for the fake GPU."""

    Stream, Event = _Stream, _Event

    @staticmethod
    def current_stream() -> _Stream:
        return _Stream()

    @staticmethod
    def stream(stream: _Stream) -> Any:
        return nullcontext()


@contextmanager
def fake_gpu(
    device_module: Any = _DeviceModule,
    to_device: Callable[[Tensor, str], Tensor] = lambda tensor, device: tensor.to(device),
) -> Iterator[None]:
    """A context in which modules sharded over a mesh are on the fake GPU, and code treats its
    tensors as GPU tensors.

    Args:
        device_module: takes the place of `torch.cuda` for FSDP.
        to_device: takes the place of parallel.mesh.to_device, which treats only cuda as a GPU.
    """
    fully_shard = "torch.distributed.fsdp._fully_shard._fully_shard"
    with ExitStack() as stack:
        stack.enter_context(
            patch(f"{fully_shard}._get_device_from_mesh", lambda mesh: torch.device(DEVICE))
        )
        stack.enter_context(patch(f"torch.{DEVICE}", device_module, create=True))
        group = _fsdp_param_group.FSDPParamGroup
        check = patch.object(group, "_validate_no_meta_params", lambda group: None)
        stack.enter_context(check)
        stack.enter_context(patch.object(FakeWork, "is_completed", lambda work: True))
        for module in ("training.step", "model.documents"):
            stack.enter_context(patch(f"{module}.to_device", to_device))
        stack.enter_context(AsOnGpu())
        yield


@contextmanager
def one_rank(sizes: MeshSizes, rank: int, device: str, has_experts: bool = False) -> Iterator[Mesh]:
    """The mesh of rank `rank`; all other ranks are fake. `device`: meta, cpu or cuda."""
    backend = f"cpu:fake,{DEVICE}:fake" if device == DEVICE else "fake"
    dist.init_process_group(backend, rank=rank, world_size=sizes.world, store=FakeStore())
    try:
        mesh = build_mesh(sizes, "cpu" if device == DEVICE else device, has_experts)
        yield replace(mesh, device=device)
    finally:
        # destroying the group uses its default backend, which is set only if one was named
        if (group := dist.group.WORLD) is not None:
            group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        dist.destroy_process_group()


def run_collective(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operator of torch.distributed on the fake GPU's tensors. The fake group does not read
    tensors, but needs them on the CPU, and of an all-to-all the number of rows."""
    empty = tree_map_only(torch.Tensor, lambda tensor: torch.empty(*tensor.shape[:1], 0), args)
    return func(*empty, **kwargs)
