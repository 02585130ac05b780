"""The tape sees what a rank does, below autograd and FSDP, and tells those that listen:

    Memory   every storage that is allocated, resized or freed (memory.py)
    Races    if there is one: also every operator, and on which stream (races.py)

It counts the collectives itself. On the fake GPU none is carried out.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from costs.as_on_gpu import DEVICE
from costs.collectives import Call, call_of, group_of, returned
from costs.storages import StorageWatch, watch_resizes
from parallel.memory import WEIGHTS, listening
from parallel.mesh import Mesh
from parallel.pipeline.actions import Action
from tools.rehearse.collectives import ONE_RANK, GroupAxes, complete
from tools.rehearse.device import Device
from tools.rehearse.host import host_of_gpu
from tools.rehearse.memory import Label, Memory
from tools.rehearse.races import Races


class Tape(StorageWatch):
    """Records storages and collectives: use `with Tape(mesh) as tape:` around everything that
    allocates, after the model is built, and `record` around each action.

    Args:
        mesh: whose axes name the collectives, and whose device's storages are recorded.
        checked: the fake GPU, if races on it are to be looked for. That takes several times as
            long, and grows with the square of the accesses to one storage.
    """

    def __init__(self, mesh: Mesh, checked: Device | None = None) -> None:
        super().__init__(mesh.device)
        self.memory = Memory()
        self.collectives: Counter[Call] = Counter()
        self._axes = GroupAxes(mesh)
        self.races = None if checked is None else Races(checked, self._axes, self.saw)
        self._lock = threading.RLock()
        self._inside = ExitStack()

    def __enter__(self) -> "Tape":
        self._inside.enter_context(watch_resizes(self))
        self._inside.enter_context(listening(self.memory.told))
        if self.races is not None:
            self._inside.enter_context(host_of_gpu(self.races, self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inside.close()

    def weights(self, tensors: list[Tensor]) -> None:
        """Add the weights, which are allocated already."""
        for tensor in tensors:
            self.saw(tensor)
            self.memory.told(tensor, WEIGHTS)

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """A context for the pipeline's runner: all that is recorded inside belongs to `action`."""
        self.memory.action = action
        yield
        self.memory.ask_holders()
        self.memory.action = None

    def clear(self) -> None:
        """Forget the collectives, before the step whose are to be reported."""
        self.collectives.clear()
        if self.races is not None:
            self.races.overlap.clear()

    def born(self, key: int, size: int, label: Label | None = None) -> None:
        self.memory.born(key, size, label)
        if self.races is not None:
            self.races.born(key)

    def freed(self, key: int, size: int) -> Label:
        if self.races is not None:
            self.races.freed(key)
        return self.memory.freed(key, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor first: the tape then sees its operators on local parts
        with self._lock:  # with --races threads of the host are seen too
            return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if self.races is not None:
            return self.races.run(func, args, kwargs)
        return func(*args, **kwargs)

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind, size = call_of(func, args)
        call = Call(self._axes.of(group_of(args), kind) or ONE_RANK, kind, size)
        if call.axis != ONE_RANK:
            self.collectives[call] += 1
            self.memory.communicates(call, args)
        if self.device != DEVICE:
            return func(*args, **kwargs)
        if self.races is None:
            return complete(func, args)
        phase = self.memory.action.kind.value if self.memory.action else "-"
        return returned(func, args, self.races.nccl.launch(func, args, call, phase))
