"""The tape sees what a rank does, below autograd and FSDP, and counts the collectives. On the fake
GPU it carries none out. What else is recorded depends on the kind of tape:

    Memory   the peak of memory, and the action in which it is (below)
    Races    what each operator reads and writes, and on which stream (races.py)
    Ledger   every operator, what it moves, and the line that causes it (operators.py)
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from costs.as_on_gpu import DEVICE
from costs.collectives import Call, Work, call_of, group_of, returned
from costs.operators import host_copy, name_of, needs_value, on_device, tensors_of
from costs.storages import StorageWatch, watch_resizes
from parallel.axes import EXPERT_AXES
from parallel.mesh import Mesh
from parallel.parameter import weights_of
from parallel.pipeline.actions import Action
from tools.rehearse.device import Device
from training.step import TrainStep

ONE_RANK = "one rank"  # the axis of what a group of one rank does


class Tape(StorageWatch):
    """Use `with tape:` around everything that is to be recorded.

    Args:
        mesh: whose axes name the collectives, and whose device's storages are recorded.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.device)
        self.collectives: Counter[Call] = Counter()
        self.action: Action | None = None  # the one that runs
        self._axes = GroupAxes(mesh)
        self._lock = threading.RLock()  # the check of races sees threads of the host too

    # --- a step ---

    def built(self, stages: Iterable[nn.Module]) -> None:
        """The stages of the rank have just been built."""

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """A context for the pipeline's runner: all that is recorded inside belongs to `action`."""
        self.action = action
        yield
        self.action = None

    def clear(self) -> None:
        """Forget what belongs to a step, before the step that is to be reported."""
        self.collectives.clear()

    def after_step(self, train: TrainStep, step: int) -> None: ...

    def report(self) -> dict[str, Any]:
        raise NotImplementedError

    # --- what a kind of tape records ---

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has run, which is none of torch.distributed's."""

    def communicates(self, call: Call, func: Any, args: Any) -> Work:
        """A collective or message begins. On the fake GPU the result is its handle."""
        return _COMPLETE

    def numbers_read(self, tensor: Tensor) -> None:
        """The host has waited for a tensor of the experts' counts, and read it."""

    # --- operators ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor first: the tape then sees its operators on local parts
        with self._lock:
            return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace != "c10d":
            result = result_of(func, args, kwargs)
            self.ran(func, args, kwargs, result)
            return result
        kind, size = call_of(func, args)
        call = Call(self._axes.of(group_of(args), kind), kind, size)
        if call.axis != ONE_RANK:
            self.collectives[call] += 1
        work = self.communicates(call, func, args)
        return returned(func, args, work) if self.device == DEVICE else func(*args, **kwargs)


class _Complete(Work):
    def is_completed(self) -> bool:
        return True


_COMPLETE = _Complete(lambda: None)


def result_of(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator returns. The fake GPU has no data for the host to read: zeros stand for
    numbers, false for a bool, and a result whose length the host would read is as long as
    possible."""
    copy = host_copy(func, args, kwargs)
    if copy is not None and copy.target == "cpu":
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    what = needs_value(func, args, kwargs)
    if not what or not on_device(list(tensors_of([*args, *kwargs.values()]))):
        return func(*args, **kwargs)
    tensor, name = args[0], name_of(func)
    if what == "a value":
        is_number = name == "_local_scalar_dense"
        return torch.zeros((), dtype=tensor.dtype).item() if is_number else False
    if name == "nonzero":
        return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)
    if name == "index":
        (mask,) = tensors_of([args[1]])
        return tensor.new_empty((mask.numel(), *tensor.shape[mask.ndim :]))
    return tensor.new_empty(tensor.numel())


class Memory(Tape):
    """The bytes of all storages that are alive, and the most so far. Use `measuring`."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.peak = self._total = 0
        self.peak_action: Action | None = None

    def built(self, stages: Iterable[nn.Module]) -> None:
        """Count only the weights and what is allocated from now on, not what building them took."""
        self._sizes.clear()
        self.peak = self._total = 0
        for stage in stages:
            for weight in weights_of(stage):
                self.saw(weight.sharded)

    def born(self, key: int, size: int) -> None:
        self._total += size
        if self._total > self.peak:
            self.peak, self.peak_action = self._total, self.action

    def freed(self, key: int, size: int) -> None:
        self._total -= size

    def report(self) -> dict[str, Any]:
        where = str(self.peak_action or "after the last action")
        return {"peak_memory_bytes": self.peak, "peak_in": where}


@contextmanager
def measuring(mesh: Mesh, _: Device) -> Iterator[Memory]:
    """A context in which all storages on the fake GPU are counted."""
    memory = Memory(mesh)
    with watch_resizes(memory), memory:
        yield memory


class GroupAxes:
    """Names a group by the view of the mesh with the same ranks (the innermost first), by `world`,
    or by `ends` (the ranks of the first and last stage, for a tied embedding). `cp` and the axes of
    experts are only the names of their own groups, as other axes may have the same ranks. Of all
    ranks there is one group: if they are those of cp, all its collectives are counted over cp; if
    of an axis of experts, over the axis of weights that has them, or else the world."""

    def __init__(self, mesh: Mesh) -> None:
        groups = {name: view.group for name, view in mesh.views.items()}
        own = {axis: groups.pop(axis) for axis in ("cp", *EXPERT_AXES[1:]) if axis in groups}
        world = mesh.root.size()
        self._axes = {ranks_of(group): name for name, group in reversed(groups.items())}
        self._axes.setdefault(frozenset(range(world)), "world")
        ep = mesh.views.get("ep")
        self._ep = None if ep is None else ep.group.group_name
        self._known = {
            group.group_name: axis if group.size() > 1 else ONE_RANK
            for axis, group in own.items()
            if axis == "cp" or group.size() < world
        }

    def of(self, group: ProcessGroup, kind: str = "") -> str:
        """The name of the axis of a collective of this kind. An all-to-all over ep's group is of
        ep."""
        name = group.group_name
        if kind == "all_to_all" and name == self._ep:
            return "ep"
        if name not in self._known:
            axis = self._axes.get(ranks_of(group), "ends")
            self._known[name] = axis if group.size() > 1 else ONE_RANK
        return self._known[name]


def ranks_of(group: ProcessGroup) -> frozenset[int]:
    return frozenset(dist.get_process_group_ranks(group))
