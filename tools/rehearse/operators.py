"""Every operator that a rank runs on the fake GPU: what it is, what it moves, and the line of code
that causes it. `python -m tools.rehearse CONFIG --operators`; docs/profiling.md explains it.

A tape (tape.py) records the operators of the second step; the first fills caches. A custom operator
of this repository is recorded as what its own code does: that code runs on tensors without data,
and only the launches of Triton kernels are replaced. Where the host would wait for a GPU, that is
noted, and the code continues with zeros. Nothing is timed.
"""

import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS

import model.kernels
from costs.as_on_gpu import AsOnGpu
from costs.collectives import Call, Work
from costs.collectives import arguments_of as arguments_of_collective
from costs.events import GROUPED, LOOKUPS, Attention, Product, event_of
from costs.operators import (
    COPIES,
    FILLS,
    host_copy,
    launches_nothing,
    name_of,
    needs_value,
    on_device,
    takes_from_host,
    tensors_of,
    traffic,
)
from costs.storages import key_of, local, watch_resizes
from hardware import H100
from model.kernels import backend
from parallel.mesh import Mesh
from parallel.pipeline.actions import FORWARD, Action
from parallel.pipeline.runner import PipelineRunner
from tools.command import table
from tools.rehearse.device import Device
from tools.rehearse.findings import FSDP, code_file
from tools.rehearse.rank import title
from tools.rehearse.tape import ONE_RANK, Tape

# --- what an operator is, and what it moves ---

# The kinds of operators, in the order in which they are printed; `pointwise` is all that moves
# bytes and has no other name.
PRODUCT, ATTENTION, TRITON, POINTWISE = "product", "attention", "Triton", "pointwise"
COPY, FILL, COLLECTIVE = "copy", "fill", "collective"
KINDS = (PRODUCT, ATTENTION, TRITON, POINTWISE, COPY, FILL, COLLECTIVE)
# PyTorch carries it out as two: a copy, and the same in place.
LAUNCHES = {"masked_fill": 2}


def size_of(tensors: list[Tensor]) -> int:
    """Bytes that the tensors occupy in memory; an expanded dimension counts once."""
    return sum(min(t.nbytes, local(t).untyped_storage().nbytes()) for t in tensors)


# --- the line that causes it, and the pass of the step ---

# Files that only pass a call on: the caller's line says more.
PASS_ON = {"model/matmul.py", "parallel/collectives.py", "parallel/mesh.py", "FSDP _fsdp_common.py"}
PASSES = ("forward", "recomputation", "backward", "FSDP", "around")


class Where(NamedTuple):
    """A place in the code."""

    file: str  # in this repository, or "FSDP …" for a file of torch's FSDP
    function: str
    line: int


def place(action: Action | None, operator: str = "") -> tuple[str, Where]:
    """The pass and the place of the operator that runs now, inside `action`: the innermost line of
    this repository or of FSDP, except in files that only pass a call on."""
    where: Where | None = None
    recomputes = False
    for frame, number in walk_stack(sys._getframe(1)):
        code = frame.f_code
        file = code_file(code.co_filename)
        if file is not None and (where is None or where.file in PASS_ON):
            where = Where(file, code.co_qualname, number)
        # checkpoint calls it when backward asks for a tensor that was not kept
        recomputes |= code.co_name == "unpack_hook" and "/torch/utils/" in code.co_filename
    where = where or Where("(no code of the repository)", "", 0)
    if where.file.startswith(FSDP) or where.file == "parallel/whole.py":
        return "FSDP", where
    if recomputes:
        return "recomputation", where
    if where.function == PipelineRunner._backward.__qualname__:
        where = of_node(operator) or where
    if action is None:
        return "around", where
    return "forward" if action.kind is FORWARD else "backward", where


def of_node(operator: str) -> Where | None:
    """The place of an operator that autograd runs for a node of its graph which is written in C++:
    the line of forward that made the node, which autograd remembers under anomaly detection."""
    node = torch._C._current_autograd_node()
    for line in reversed(node.metadata.get("traceback_", []) if node is not None else []):
        path, number, function = line.strip().split("\n")[0].split(", ")
        file = code_file(path.removeprefix('File "').removesuffix('"'))
        if file is not None and file not in PASS_ON:
            name = f"backward of {function.removeprefix('in ')}"
            if operator == "add":
                name = f"autograd's sum of two gradients, after the {name}"
            return Where(file, name, int(number.split()[-1]))
    return None


# --- launches and waits that are no operators ---


class _Launcher:
    """Takes the place of a Triton kernel."""

    def __init__(self, name: str, launched: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **_: self.launched(self.name, args)


@contextmanager
def launches_noted(launched: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """A context in which a launch of one of this repository's Triton kernels only calls `launched`,
    with the kernel's name and arguments. (Triton need not be installed.)"""
    with ExitStack() as stack:
        for found in pkgutil.iter_modules(model.kernels.__path__):
            module = importlib.import_module(f"model.kernels.{found.name}")
            for name in re.findall(r"^@jit\ndef (\w+)", inspect.getsource(module), re.MULTILINE):
                launcher = _Launcher(f"{found.name}.{name.strip('_')}", launched)
                stack.enter_context(patch.object(module, name, launcher))
        if isinstance(backend.tl, SimpleNamespace):  # no Triton: names of dtypes, which go unused
            for name in ("float32", "float64", "bfloat16"):
                stack.enter_context(patch.object(backend.tl, name, name, create=True))
        # some kernels launch so many programs, and add up their parts
        count = H100.multiprocessors
        stack.enter_context(patch.object(backend, "_multiprocessors", lambda device: count))
        yield


# --- the record ---


@dataclass(slots=True, eq=False)
class Operator:
    """One operator or launch."""

    part: str  # the pass
    where: Where
    kind: str
    name: str
    launches: int = 1
    bytes: int = 0  # read and written
    waits: bool = False  # whether the host waits for it
    written: int = 0  # storages that it has written …
    lost: int = 0  # … and those that were freed before anything had read them

    @property
    def for_nothing(self) -> bool:
        return 0 < self.written == self.lost


class Ledger(Tape):
    """Records the operators of the calling thread, backward included. Use `recording`."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.operators: list[Operator] = []
        # the storages that are alive: what has written each since it was last read
        self._unread: dict[int, list[Operator]] = {}
        self._launches: list[Operator] = []  # of the custom operator that runs

    def clear(self) -> None:
        super().clear()
        self.operators.clear()

    def report(self) -> dict[str, Any]:
        return {"operators": summed(self.operators)}

    # --- operators ---

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # inside a custom operator, below autograd: record the operators that it consists of
            with self, torch._C.DisableTorchFunction():
                return func.decompose(*args, **kwargs)
        if func.namespace == "lattice" and name_of(func) not in GROUPED:
            return self._as_on_gpu(func, args, kwargs)
        return super().run(func, args, kwargs)

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = name_of(func)
        given, made = list(tensors_of([*args, *kwargs.values()])), list(tensors_of([result]))
        copy = host_copy(func, args, kwargs)
        copies_back = copy is not None and copy.target == "cpu"
        if copies_back or (on_device(given) and needs_value(func, args, kwargs)):
            self.waited(name, waits=copy is None or copy.blocks)
            return
        if launches_nothing(func) or not on_device([*given, *made]):
            return
        event = event_of(func, args, kwargs, result)
        kind = COPY if name in COPIES else FILL if name in FILLS else POINTWISE
        if isinstance(event, Product | Attention):
            kind = PRODUCT if isinstance(event, Product) else ATTENTION
        launches = event.launches if isinstance(event, Product) else LAUNCHES.get(name, 1)
        read, written = traffic(func, args, kwargs, made)
        moved = size_of(read) + size_of(written) * (2 * LAUNCHES.get(name, 1) - 1)
        if name in LOOKUPS:  # reads as much of its first argument as it writes
            moved += size_of(written) - size_of(read[:1])
        waits = takes_from_host(given) if copy is None else copy.blocks
        done = Operator(*place(self.action, name), kind, name, launches, moved, waits)
        self._record(done, read, written)

    def communicates(self, call: Call, func: Any, args: Any) -> Work:
        launches = int(call.axis != ONE_RANK)  # one rank: in place, launches nothing
        name = f"{call.kind} over {call.axis}"
        done = Operator(*place(self.action), COLLECTIVE, name, launches, call.bytes)
        self._record(done, *arguments_of_collective(call.kind, args))
        return super().communicates(call, func, args)

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
        self._launches.append(Operator(*place(self.action), TRITON, name))
        self._record(self._launches[-1], list(tensors_of(args)), [])

    def waited(self, name: str, waits: bool = True) -> None:
        """The host waited for the device, in something that launches nothing."""
        done = Operator(*place(self.action), COPY, name, launches=0, waits=waits)
        self.operators.append(done)

    def numbers_read(self, tensor: Tensor) -> None:
        """The host waited for the numbers of a tensor, and has read them."""
        self.waited("tolist")
        self._read([tensor])

    # --- storages: a result that is freed before anything has read it was for nothing ---

    def _record(self, done: Operator, read: list[Tensor], written: list[Tensor]) -> None:
        self.operators.append(done)
        self._read(read)
        self._wrote(done, written)

    def _read(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._unread.get(key_of(tensor), []).clear()

    def _wrote(self, done: Operator, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self.saw(tensor)
            if (unread := self._unread.get(key_of(tensor))) is not None:
                unread.append(done)
                done.written += 1

    def born(self, key: int, size: int) -> None:
        self._unread[key] = []

    def freed(self, key: int, size: int) -> None:
        for done in self._unread.pop(key):
            done.lost += 1


@contextmanager
def recording(mesh: Mesh, device: Device) -> Iterator[Ledger]:
    """A context in which a ledger records what the calling thread does on the fake GPU."""
    ledger = Ledger(mesh)
    device.found = lambda kind, text: ledger.waited(text)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection")
        # remembers for each node of autograd's graph the line that made it (`of_node`)
        lines = torch.autograd.set_detect_anomaly(True, check_nan=False)
    with lines, watch_resizes(ledger), launches_noted(ledger.launched), ledger:
        yield ledger


# --- the report ---


def summed(found: list[Operator]) -> list[dict[str, Any]]:
    """The operators in rows: those of one pass, kind, name and place are added up."""
    sums: dict[tuple[str, ...], dict[str, Any]] = {}
    for done in found:
        file, function, line = done.where
        key = (done.part, done.kind, done.name, file, function)
        names = ("pass", "kind", "name", "file", "function")
        row = sums.setdefault(key, dict(zip(names, key, strict=True)) | {"line": line})
        for figure in ("launches", "bytes", "waits", "for_nothing"):
            row[figure] = row.get(figure, 0) + int(getattr(done, figure))
    return sorted(sums.values(), key=lambda row: PASSES.index(row["pass"]))


def describe_operators(report: dict[str, Any]) -> str:
    """The tables of a report: launches by pass and kind; then, with their places, what moves 1 MB
    or more without being a product, an attention or a kernel of this repository, what is for
    nothing, and what the host waits for. Milliseconds are bytes over an H100's bandwidth."""
    found = report["operators"]
    sums = [("pass", "kind", "launches", "MB")]
    for part, kind in product(PASSES, KINDS):
        these = [row for row in found if (row["pass"], row["kind"]) == (part, kind)]
        if launches := sum(row["launches"] for row in these):
            size = f"{sum(row['bytes'] for row in these) / 1e6:,.1f}"
            sums.append((part, kind, str(launches), "" if kind == COLLECTIVE else size))
    sums.append(("together", "", str(sum(row["launches"] for row in found)), ""))
    lines = [f"{title(report)}: one step", "", table(sums, left=(0, 1))]

    def listed(title: str, these: list[dict[str, Any]]) -> None:
        lines.extend(["", title] + ["  none"] * (not these))
        for row in these:
            milliseconds = 1e3 * row["bytes"] / H100.memory_bytes_per_second
            lines.append(
                f"  {row['bytes'] / 1e6:9,.1f} MB {milliseconds:6.3f} ms {row['launches']:3} × "
                f"{row['name']:21} {row['pass']}: {row['file']}:{row['line']} {row['function']}"
            )

    large = [r for r in found if r["kind"] in (COPY, FILL, POINTWISE) and r["bytes"] >= 1e6]
    large.sort(key=lambda row: -row["bytes"])
    listed("copies, fills and pointwise operators of 1 MB or more", large)
    listed("results that nothing reads", [row for row in found if row["for_nothing"]])
    listed("operators for which the host waits", [row for row in found if row["waits"]])
    return "\n".join(lines)
