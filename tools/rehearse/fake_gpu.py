"""A GPU that is not there, and a world of which this process is the only rank: for tools/rehearse.

Tensors are on torch's meta device: they have shapes and dtypes and no memory. What the training
code asks of a GPU is answered so that it takes the way it takes on one:

    a tensor's `is_cuda`        True: Triton kernels (their registered shapes), gradients summed in
                                a wider dtype by cuBLAS
    causal attention            flash attention's operator: its output and one number per row are
                                kept, no square of S × S
    streams and events of FSDP  objects that do nothing; FSDP holds its buffers as on a GPU
    collectives                 torch's fake process group: nobody is there, no wait takes time

torch has fake tensors for the same purpose. They do this in Python, operation by operation, and
take four times as long.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from parallel.axes import MeshSizes
from parallel.mesh import Mesh, build_mesh

DEVICE = "meta"


class _Event:
    """In FSDP's way of recording and waiting, for a device that is always ready."""

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
    """What `torch.cuda` is to a GPU."""

    Stream, Event = _Stream, _Event

    @staticmethod
    def current_stream() -> _Stream:
        return _Stream()

    @staticmethod
    def stream(stream: _Stream) -> Any:
        return nullcontext()


class _AsOnGpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0].device.type == DEVICE
        if func is functional.scaled_dot_product_attention:
            assert kwargs["attn_mask"] is None, "with a mask there is no flash attention"
            return torch.ops.aten._scaled_dot_product_flash_attention(
                *args, 0.0, kwargs["is_causal"]
            )[0]
        return func(*args, **kwargs)


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Inside, modules sharded over a mesh live on the fake GPU; code on its tensors believes it."""
    fully_shard = "torch.distributed.fsdp._fully_shard._fully_shard"
    with ExitStack() as stack:
        stack.enter_context(
            patch(f"{fully_shard}._get_device_from_mesh", lambda mesh: torch.device(DEVICE))
        )
        stack.enter_context(patch(f"torch.{DEVICE}", _DeviceModule, create=True))
        group = _fsdp_param_group.FSDPParamGroup
        check = patch.object(group, "_validate_no_meta_params", lambda group: None)
        stack.enter_context(check)
        stack.enter_context(patch.object(FakeWork, "is_completed", lambda work: True))
        for module in ("training.step", "model.documents"):  # a CPU's tensors stay where they are
            stack.enter_context(
                patch(f"{module}.to_device", lambda tensor, device: tensor.to(device))
            )
        stack.enter_context(_AsOnGpu())
        yield


@contextmanager
def one_rank(sizes: MeshSizes, rank: int, device: str) -> Iterator[Mesh]:
    """The mesh as `rank` of its world sees it, all others fake; `device`: meta, cpu or cuda."""
    backend = f"cpu:fake,{DEVICE}:fake" if device == DEVICE else "fake"
    dist.init_process_group(backend, rank=rank, world_size=sizes.world, store=FakeStore())
    try:
        mesh = build_mesh(sizes, "cpu" if device == DEVICE else device)
        yield Mesh(device, mesh.root, mesh.batch)
    finally:
        dist.destroy_process_group()


def run_collective(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """An operator of torch.distributed on the fake GPU's tensors. The fake group looks at none, but
    wants some of the CPU's."""
    return func(*tree_map_only(torch.Tensor, lambda tensor: torch.empty(0), args), **kwargs)
