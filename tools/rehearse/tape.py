"""Records what a computation allocates and which collectives it calls, below autograd and FSDP.

Every storage is noted when the first operator returns it and when it is freed, with the place in
the source that asked for it. Afterwards the tape says how high memory rose and what was there at
that moment. Sizes are rounded up as CUDA's caching allocator rounds them, so that the sum is what
`torch.cuda.max_memory_allocated` counts; memory that operators use and free inside themselves is
not seen.
"""

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.axes import AXES
from parallel.mesh import Mesh
from parallel.pipeline.actions import FORWARD, Action
from plan.categories import (
    ACTIVATIONS,
    DEFERRED,
    GATHERED,
    GATHERING,
    GRADIENTS,
    MESSAGES,
    MOMENTS,
    REDUCING,
    SHARDED_GRADIENTS,
    TEMPORARY,
    WEIGHTS,
)
from plan.traffic import Call
from tools.rehearse.fake_gpu import DEVICE, run_collective

ROUNDING = 512  # bytes: CUDA's caching allocator hands out multiples of it
KINDS = {  # operators of torch.distributed; the whole tensor of each is its largest
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
    "recv_": "receive",
}
HOUSE = str(Path(__file__).parent.parent.parent)
FSDP = str(Path("torch", "distributed", "fsdp", "_fully_shard"))

# A model is built on the meta device, where nothing takes memory, cut there by FSDP, and only then
# made. On the fake GPU, the meta device too, what FSDP has cut counts as the weights; the uncut
# model and the weights made of it do not count.
NOT_YET_THERE = {
    ("layer.py", "Layer.add_weight"),
    ("build.py", "build_stage"),
    ("_fully_shard.py", "FSDPModule._apply"),
}


@dataclass(slots=True)
class Piece:
    """One storage, as long as it has one size."""

    bytes: int
    born: int  # at this tick of the tape
    born_in: Action | None  # None: before the step's first action, or after its last
    file: str  # that asked for it: the innermost of ours or of FSDP's
    function: str
    died: int = sys.maxsize
    died_in: Action | None = None

    @property
    def category(self) -> str:
        """What it was for. Whether a storage outlived the action it was made in is what tells a
        result from a scratch pad."""
        outlived = self.died == sys.maxsize or self.died_in != self.born_in
        if self.function == "FSDPParam._init_sharded_param":
            return WEIGHTS
        if self.function.startswith("ShardedOptimizer.__init__"):
            return MOMENTS
        if self.file == "_fsdp_collectives.py":
            if self.function == "foreach_reduce":
                return SHARDED_GRADIENTS if outlived else REDUCING
            return GATHERING
        if self.file.startswith("_fsdp"):
            return (
                GRADIENTS
                if self.function == "FSDPParam.to_accumulated_grad_if_needed"
                else GATHERED
            )
        if self.file == "transfer.py":
            return MESSAGES if not outlived or self.born_in is not None else ACTIVATIONS
        if self.born_in is None:
            return TEMPORARY
        if self.function in ("Matmul.weight_gradient", "embedding_gradient"):
            return GRADIENTS
        if not outlived:
            return TEMPORARY
        if self.born_in.kind is FORWARD:
            return ACTIVATIONS
        return MESSAGES if self.file == "runner.py" else DEFERRED


class Tape(TorchDispatchMode):
    """`with Tape(mesh) as tape:` around everything that allocates, from the model on; `record`
    around each action."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.device = mesh.device
        self.collectives: Counter[Call] = Counter()
        self.peak = 0
        self.peak_action: Action | None = None
        self._axis_of_ranks = axes_by_ranks(mesh)
        self._axis_of_group: dict[str, str | None] = {}
        self._total = 0
        self._tick = self._peak_tick = 0
        self._action: Action | None = None
        self._live: dict[int, Piece] = {}  # by the address of the storage's C++ object
        self._dead: list[Piece] = []  # that may have been there at the peak
        self._resize = torch.UntypedStorage.resize_

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """For the pipeline's runner: what is inside belongs to `action`."""
        self._action = action
        yield
        self._action = None

    def __enter__(self) -> "Tape":
        # FSDP frees gathered weights by resizing their storages, which no operator does.
        self._patch = patch.object(
            torch.UntypedStorage, "resize_", lambda storage, size: self._resized(storage, size)
        )
        self._patch.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.__exit__(*error)
        super().__exit__(*error)

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the moment of the peak, largest first; they add up to `peak`."""
        table: dict[str, int] = defaultdict(int)
        for piece in self.pieces_at_peak():
            table[piece.category] += piece.bytes
        return dict(sorted(table.items(), key=lambda item: -item[1]))

    def pieces_at_peak(self) -> list[Piece]:
        everything = [*self._dead, *self._live.values()]
        return [
            piece
            for piece in everything
            if piece.born <= self._peak_tick < piece.died and piece.bytes
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._heard(func, args)
            return (
                run_collective(func, args, kwargs)
                if self.device == DEVICE
                else func(*args, **kwargs)
            )
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._saw(result)
        elif isinstance(result, (tuple, list)):
            for part in result:
                if isinstance(part, Tensor):
                    self._saw(part)
        return result

    def _saw(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            weakref.finalize(storage, self._freed, key).atexit = False
            self._born(key, storage.nbytes())

    def _born(self, key: int, size: int) -> None:
        size = -(-size // ROUNDING) * ROUNDING
        self._tick += 1
        place = _who_asks()
        if self.device == DEVICE and place in NOT_YET_THERE:
            size = 0
        self._total += size
        self._live[key] = Piece(size, self._tick, self._action, *place)
        if self._total > self.peak:
            self.peak, self._peak_tick, self.peak_action = self._total, self._tick, self._action

    def _freed(self, key: int) -> None:
        piece = self._live.pop(key, None)
        if piece is None:
            return
        self._tick += 1
        self._total -= piece.bytes
        piece.died, piece.died_in = self._tick, self._action
        if piece.born <= self._peak_tick:
            self._dead.append(piece)

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        result = self._resize(storage, size)
        if storage._cdata in self._live:
            self._freed(storage._cdata)
            self._born(storage._cdata, size)
        return result

    def _heard(self, func: Any, args: Any) -> None:
        boxed = next(
            arg
            for arg in args
            if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
        )
        group = dist.ProcessGroup.unbox(boxed)
        if group.group_name not in self._axis_of_group:
            ranks = frozenset(dist.get_process_group_ranks(group))
            self._axis_of_group[group.group_name] = (
                self._axis_of_ranks(ranks) if len(ranks) > 1 else None
            )
        axis = self._axis_of_group[group.group_name]
        if axis is not None:
            tensors = [
                leaf for arg in args for leaf in (arg if isinstance(arg, (list, tuple)) else (arg,))
            ]
            size = max(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
            name = func.name().split(".")[0].removeprefix("c10d::")
            self.collectives[Call(axis, KINDS.get(name, name), size)] += 1


def axes_by_ranks(mesh: Mesh) -> Callable[[frozenset[int]], str]:
    """Names a group by the axis whose ranks it has: an axis of the mesh (the innermost first),
    `loss` (both data-parallel axes), `world`, or `ends` (the first and the last stage's rank, for a
    tied embedding)."""
    views = [(axis, mesh.root[axis]) for axis in reversed(AXES)] + [("loss", mesh.loss)]
    groups = [
        (name, frozenset(dist.get_process_group_ranks(view.get_group()))) for name, view in views
    ]
    groups.append(("world", frozenset(range(mesh.root.size()))))
    return lambda ranks: next((name for name, members in groups if members == ranks), "ends")


@cache
def _place(code: CodeType) -> tuple[str, str] | None:
    """File and function, if they are ours or FSDP's; of FSDP's helpers the caller says more."""
    path = Path(code.co_filename)
    if FSDP in code.co_filename:
        helper = path.name == "_fsdp_common.py" or code.co_name in ("allocate", "alloc_storage")
        return None if helper else (path.name, code.co_qualname)
    ours = (
        code.co_filename.startswith(HOUSE)
        and "site-packages" not in path.parts
        and path.name not in ("tape.py", "fake_gpu.py")
    )
    return (path.name, code.co_qualname) if ours else None


def _who_asks() -> tuple[str, str]:
    """The innermost such caller."""
    frame = sys._getframe(1)
    while frame is not None:
        place = _place(frame.f_code)
        if place is not None:
            return place
        frame = frame.f_back  # type: ignore[assignment]
    return "", ""
