"""The peak of a rank's memory, and what it is used for at that moment.

Every storage is recorded when an operator first returns it and when it is freed, with the action in
which it was allocated. Its category is determined

    by the code                      gradients of weights, messages of the pipeline
                                     (parallel/memory.py)
    by its holder after an action    weights, moments, FSDP's gathered weights and sums
    by collectives over dp           their buffers
    otherwise by its lifetime        allocated in a forward and alive after it: an activation; in a
                                     backward: kept for weight gradients; else temporary

(With ZeRO-3 a unit's weights are gathered and freed within one action, and count as temporary.)
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from costs.collectives import Call, Work
from costs.operators import tensors_of
from costs.storages import key_of, watch_resizes
from parallel.memory import ACTIVATIONS, DEFERRED, GATHERING, REDUCING, TEMPORARY, listening
from parallel.mesh import Mesh
from parallel.parameter import weights_of
from parallel.pipeline.actions import FORWARD, Action
from runtime.metrics.memory_report import tensors_by_category
from tools.rehearse.device import Device
from tools.rehearse.tape import Tape
from training.step import TrainStep

DATA_PARALLEL = ("dp_replicate", "dp_shard", "ep_replicate", "efsdp")
BUFFERS = {"all_gather": GATHERING, "reduce_scatter": REDUCING, "all_reduce": REDUCING}


@dataclass(slots=True)
class Label:
    """The category of a storage. It outlasts resizes, because FSDP frees and refills the same
    storages."""

    told: str | None = None  # by the code or by a holder
    buffer: str | None = None  # of a collective


@dataclass(slots=True)
class Piece:
    """One storage, for as long as its size does not change."""

    bytes: int
    born: int  # at this tick of the tape
    born_in: Action | None  # None: outside of actions
    label: Label
    died: int = sys.maxsize
    died_in: Action | None = None

    @property
    def category(self) -> str:
        told = self.label.told or self.label.buffer
        if told is not None:
            return told
        outlived = self.died == sys.maxsize or self.died_in != self.born_in
        if self.born_in is None or not outlived:
            return TEMPORARY
        return ACTIVATIONS if self.born_in.kind is FORWARD else DEFERRED


@contextmanager
def measuring(mesh: Mesh, _: Device) -> Iterator["Memory"]:
    """A context in which all storages on the fake GPU are recorded."""
    memory = Memory(mesh)
    with watch_resizes(memory), listening(memory.told), memory:
        yield memory


class Memory(Tape):
    """All storages that are alive, and those that were at the peak. Use `measuring`."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        # the tensors that model, FSDP and optimizer hold, by category
        self.held: Callable[[], dict[str, list[Tensor]]] = dict
        self.peak = 0
        self.peak_action: Action | None = None
        self._total = 0
        self._tick = self._peak_tick = 0
        self._live: dict[int, Piece] = {}  # by storage
        self._dead: list[Piece] = []  # freed pieces that may have been alive at the peak

    def built(self, stages: Iterable[nn.Module]) -> None:
        """Count only the weights and what is allocated from now on, not what building them took."""
        self._sizes.clear()
        self._live.clear()
        self.peak = self._total = 0
        for stage in stages:
            for weight in weights_of(stage):
                self.saw(weight.sharded)

    def attach(self, train: TrainStep) -> None:
        super().attach(train)
        self.held = partial(tensors_by_category, train)

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        with super().record(action):
            yield
            self.ask_holders()

    def told(self, tensor: Tensor, category: str) -> None:
        piece = self._live.get(key_of(tensor))
        if piece is not None:
            piece.label.told = category

    def ask_holders(self) -> None:
        for category, tensors in reversed(self.held().items()):  # the first category wins
            for tensor in tensors:
                self.told(tensor, category)

    def communicates(self, call: Call, func: Any, args: Any) -> Work:
        """The tensors of a collective are its buffers, if it is one of data parallelism."""
        if call.axis in DATA_PARALLEL and call.kind in BUFFERS:
            for tensor in tensors_of(args):
                piece = self._live.get(key_of(tensor))
                if piece is not None:
                    piece.label.buffer = BUFFERS[call.kind]
        return super().communicates(call, func, args)

    def report(self) -> dict[str, Any]:
        """The peak, the action in which it was, and bytes by category at that moment, largest
        first; they add up to the peak."""
        self.ask_holders()
        table: dict[str, int] = defaultdict(int)
        for piece in [*self._dead, *self._live.values()]:
            if piece.born <= self._peak_tick < piece.died and piece.bytes:
                table[piece.category] += piece.bytes
        return {
            "peak_memory_bytes": self.peak,
            "peak_in": str(self.peak_action or "after the last action"),
            "memory": dict(sorted(table.items(), key=lambda item: -item[1])),
        }

    def born(self, key: int, size: int, label: Label | None = None) -> None:
        self._tick += 1
        self._total += size
        self._live[key] = Piece(size, self._tick, self.action, label or Label())
        if self._total > self.peak:
            self.peak, self._peak_tick, self.peak_action = self._total, self._tick, self.action

    def freed(self, key: int, size: int) -> Label:
        piece = self._live.pop(key)
        self._tick += 1
        self._total -= size
        piece.died, piece.died_in = self._tick, self.action
        if piece.born <= self._peak_tick:
            self._dead.append(piece)
        return piece.label
