"""The peak of a rank's memory, and the action in which it is."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from costs.storages import watch_resizes
from parallel.mesh import Mesh
from parallel.parameter import weights_of
from parallel.pipeline.actions import Action
from tools.rehearse.device import Device
from tools.rehearse.tape import Tape


@contextmanager
def measuring(mesh: Mesh, _: Device) -> Iterator["Memory"]:
    """A context in which all storages on the fake GPU are counted."""
    memory = Memory(mesh)
    with watch_resizes(memory), memory:
        yield memory


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
