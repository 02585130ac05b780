"""Records every operator that works on the fake GPU: what it is, what it reads and writes, and the
line of code that causes it.

    with fake_gpu(), recording(mesh) as ledger:
        train.record = ledger.record
        train(…)
    ledger.operations

The ledger is a dispatch mode, below autograd and FSDP. A custom operator of this repository is
recorded as what its own code does: that code runs on tensors without data, and only the launches of
Triton kernels are replaced (budget_launches.py). Where the host would wait for a GPU, the ledger
notes it, and the code continues with zeros.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS

from benchmarks.budget_kinds import (
    COLLECTIVE,
    COPY,
    LAUNCHES,
    OF_ONE_RANK,
    TRITON,
    kind_of,
    size_of,
    traffic,
)
from benchmarks.budget_launches import recorded_launches, recorded_waits
from benchmarks.budget_places import Where, place
from costs.as_on_gpu import DEVICE, AsOnGpu
from costs.collectives import arguments_of as arguments_of_collective
from costs.collectives import call_of, group_of
from costs.events import GROUPED, LOOKUPS, Attention, Product, event_of
from costs.operators import (
    host_copy,
    launches_nothing,
    name_of,
    needs_value,
    on_device,
    on_host,
    takes_from_host,
    tensors_of,
    value_without_data,
)
from costs.storages import StorageWatch, key_of, watch_resizes
from parallel.mesh import Mesh
from parallel.pipeline.actions import Action
from tools.rehearse.collectives import GroupAxes, complete


@dataclass(slots=True, eq=False)
class Operation:
    """One operator or launch."""

    part: str  # the pass
    kind: str
    name: str
    where: Where
    launches: int = 1
    bytes: int = 0  # read and written
    flops: float = 0.0  # of a product or attention
    waits: bool = False  # whether the host waits for it
    written: int = 0  # storages that it has written …
    lost: int = 0  # … and those that were freed before anything had read them
    unread: int = 0  # bytes of the latter

    @property
    def for_nothing(self) -> bool:
        return 0 < self.written == self.lost


@dataclass(slots=True)
class Temporary:
    """A storage that is freed in the forward or backward in which it was allocated."""

    bytes: int
    part: str
    where: Where


@dataclass(slots=True)
class _Storage:
    """A storage that is alive."""

    bytes: int
    action: Action | None  # in which it was allocated
    part: str
    where: Where
    unread: list[Operation] = field(default_factory=list)  # have written it since it was last read


class Ledger(StorageWatch):
    """Records the operators of the calling thread, backward included. Use `recording`.

    Args:
        mesh: whose axes name the collectives.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(DEVICE)
        self.operations: list[Operation] = []
        self.temporaries: list[Temporary] = []
        self._axes = GroupAxes(mesh)
        self._action: Action | None = None
        self._alive: dict[int, _Storage] = {}
        self._launches: list[Operation] = []  # of the custom operator that runs
        self._now = place(None)
        self.is_closed = False

    def clear(self) -> None:
        """Forget what was recorded. (Call it after a first step, which fills caches.)"""
        self.operations.clear()
        self.temporaries.clear()

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """A context for the pipeline's runner: what is recorded inside belongs to `action`."""
        self._action = action
        yield
        self._action = None

    # --- operators ---

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = name_of(func)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # inside a custom operator, below autograd: record the operators that it consists of
            with self, torch._C.DisableTorchFunction():
                return func.decompose(*args, **kwargs)
        self._now = place(self._action, name)
        if func.namespace == "c10d":
            return self._collective(func, args)
        if func.namespace == "lattice" and name not in GROUPED:
            return self._as_on_gpu(func, args, kwargs)
        given = list(tensors_of([*args, *kwargs.values()]))
        if on_device(given) and (what := needs_value(func, args, kwargs)):
            self.waited(name)
            return value_without_data(func, args) if what == "a value" else _longest(name, args)
        copy = host_copy(func, args, kwargs)
        if copy is not None and copy.target == "cpu" and name == "_to_copy":
            self.waited(name, waits=copy.blocks)
            return on_host(args[0], kwargs.get("dtype"))
        result = func(*args, **kwargs)
        made = list(tensors_of([result]))
        if launches_nothing(func) or not on_device([*given, *made]):
            return result
        read, written = traffic(func, args, kwargs, made)
        event = event_of(func, args, kwargs, result)
        kind = kind_of(name, event)
        launches = event.launches if isinstance(event, Product) else LAUNCHES.get(name, 1)
        done = Operation(self._now[0], kind, name, self._now[1], launches)
        done.bytes = size_of(read) + size_of(written)
        done.bytes += (LAUNCHES.get(name, 1) - 1) * 2 * size_of(written)
        if name in LOOKUPS:  # reads as much of its first argument as it writes
            done.bytes += size_of(written) - size_of(read[:1])
        if isinstance(event, Product | Attention):
            done.flops = event.flops
        done.waits = takes_from_host(given) if copy is None else copy.blocks
        self.operations.append(done)
        self._read(read)
        self._wrote(done, written)
        return result

    def _collective(self, func: Any, args: Any) -> Any:
        kind, size = call_of(func, args)
        axis = self._axes.of(group_of(args), kind)
        done = Operation(
            self._now[0],
            COLLECTIVE if axis else OF_ONE_RANK,
            f"{kind} over {axis or 'one rank'}",
            self._now[1],
        )
        done.bytes, done.launches = size, 1 if axis else 0
        self.operations.append(done)
        read, written = arguments_of_collective(kind, args)
        self._read(read)
        self._wrote(done, written)
        return complete(func, args)

    def _as_on_gpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a custom operator's own code, down to its launches."""
        outer, self._launches = self._launches, []
        with self, AsOnGpu():
            result = OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        mine, self._launches = self._launches, outer
        read, written = traffic(func, args, kwargs, list(tensors_of([result])))
        self._read(read)
        for i, launch in enumerate(mine):
            launch.bytes = 0 if i else size_of(read) + size_of(written)
            self._wrote(launch, written)
        return result

    def launched(self, name: str, args: tuple[Any, ...]) -> None:
        """A Triton kernel was launched."""
        part, where = place(self._action)
        self._launches.append(Operation(part, TRITON, name, where))
        self.operations.append(self._launches[-1])
        self._read(list(tensors_of(args)))

    def waited(self, name: str, waits: bool = True) -> None:
        """The host waited for the device, in something that launches nothing."""
        part, where = place(self._action)
        self.operations.append(Operation(part, COPY, name, where, launches=0, waits=waits))

    def numbers_read(self, tensor: Tensor) -> None:
        """The host waited for the numbers of a tensor, and has read them."""
        self.waited("tolist")
        self._read([tensor])

    # --- storages ---

    def _read(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if (storage := self._alive.get(key_of(tensor))) is not None:
                storage.unread.clear()

    def _wrote(self, done: Operation, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self.saw(tensor)
            if (storage := self._alive.get(key_of(tensor))) is not None:
                storage.unread.append(done)
                done.written += 1

    def born(self, key: int, size: int, label: Any = None) -> None:
        self._alive[key] = _Storage(size, self._action, *self._now)

    def freed(self, key: int, size: int) -> None:
        storage = self._alive.pop(key)
        if self.is_closed:  # what is alive at the end may be read later
            return
        for done in storage.unread:
            done.lost += 1
            done.unread += storage.bytes
        if storage.action is not None and storage.action == self._action:
            self.temporaries.append(Temporary(size, storage.part, storage.where))


@contextmanager
def recording(mesh: Mesh) -> Iterator[Ledger]:
    """A context in which a ledger records what the calling thread does on the fake GPU."""
    ledger = Ledger(mesh)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection")
        # remembers for each node of autograd's graph the line that made it (budget_places.py)
        lines = torch.autograd.set_detect_anomaly(True, check_nan=False)
    launches, waits = recorded_launches(ledger.launched), recorded_waits(ledger.waited)
    with lines, watch_resizes(ledger), launches, waits, ledger:
        yield ledger
    ledger.is_closed = True


def _longest(name: str, args: Any) -> Tensor:
    """Stands for a result whose length the host reads from the device: as long as possible."""
    tensor: Tensor = args[0]
    if name == "nonzero":
        return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
    if name == "index":
        (mask,) = tensors_of([args[1]])
        return tensor.new_empty((mask.numel(), *tensor.shape[mask.dim() :]))
    return tensor.new_empty(tensor.numel())
