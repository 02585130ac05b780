"""A fake GPU, and a fake world in which this process is the only real rank.

Tensors have shapes and dtypes but no memory (costs/as_on_gpu.py). Streams and events are those of
device.py; FSDP uses them, and holds its buffers as on a GPU. Nothing arrives from other ranks:
torch's fake process group has no peers, and the tape (tape.py) carries out no collective.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from costs.as_on_gpu import DEVICE, AsOnGpu
from costs.operators import copies_values
from parallel.axes import MeshSizes
from parallel.mesh import Mesh, build_mesh, to_device
from tools.rehearse.device import Device

_CUDA = ("Event", "Stream", "stream", "current_stream", "synchronize", "current_device",
         "set_device", "is_initialized")  # fmt: skip


class OnFakeGpu(AsOnGpu):
    """A context in which the calling thread's code for GPUs works without one: tensors on the fake
    GPU, pinned memory, and copies to `cuda`."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.pin_memory:
            return self.device.pin(args[0].clone())
        if func == Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            return func(args[0], DEVICE, *args[2:], **kwargs)
        if kwargs.pop("pin_memory", False):  # zeros, because the save refuses what is not finite
            return self.device.pin(torch.zeros(*args, **kwargs))
        if copies_values(func, kwargs):
            self.device.waits(f"{func.__name__}() copies to the device", {})
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def fake_gpu() -> Iterator[Device]:
    """A context in which modules sharded over a mesh are on the fake GPU, and code treats its
    tensors as GPU tensors."""
    device = Device()
    of_mesh = "torch.distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh"
    with (
        patch(f"torch.{DEVICE}", device, create=True),
        patch.multiple(torch.cuda, **{name: getattr(device, name) for name in _CUDA}),
        patch(of_mesh, lambda mesh: torch.device(DEVICE)),
        patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
        # to_device itself treats only cuda as a GPU
        patch("training.step.to_device", lambda tensor, _: to_device(tensor, "cuda")),
        patch("model.documents.to_device", lambda tensor, _: to_device(tensor, "cuda")),
        # of offloaded weights it would see only the host: their mesh is that of a CPU
        patch(
            "training.optimizers.muon.Optimizer._of_products",
            lambda muon: (torch.device(DEVICE), muon.products_in(muon.shards[0].dtype)),
        ),
        OnFakeGpu(device),
    ):
        yield device


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
