"""Records what a computation allocates and which collectives it calls, below autograd and FSDP.

Every storage is recorded when an operator first returns it and when it is freed, with the action in
which it was allocated. Its category is determined

    by the code                      gradients of weights, messages of the pipeline
                                     (parallel/memory.py)
    by its holder after an action    weights, moments, FSDP's gathered weights and sums
    by collectives over dp           their buffers
    otherwise by its lifetime        allocated in a forward and alive after it: an activation; in a
                                     backward: kept for weight gradients; else temporary

Afterwards the tape reports the peak of memory and its categories at that moment. (With ZeRO-3 a
unit's weights are gathered and freed within one action, and count as temporary.)
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from costs.collectives import Call, call_of, group_of
from costs.operators import tensors_of
from costs.storages import StorageWatch, key_of, watch_resizes
from parallel.axes import EXPERT_AXES
from parallel.memory import (
    ACTIVATIONS,
    DEFERRED,
    GATHERING,
    REDUCING,
    TEMPORARY,
    WEIGHTS,
    listening,
)
from parallel.mesh import Mesh
from parallel.pipeline.actions import FORWARD, Action
from tools.rehearse.fake_gpu import DEVICE, run_collective

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


class Tape(StorageWatch):
    """Records storages and collectives: use `with Tape(mesh) as tape:` around everything that
    allocates, after the model is built, and `record` around each action.

    Args:
        mesh: whose axes name the collectives, and whose device's storages are recorded.
        held: returns the tensors that model, FSDP and optimizer hold, by category; called after
            each action.
    """

    def __init__(
        self, mesh: Mesh, held: Callable[[], dict[str, list[Tensor]]] = lambda: {}
    ) -> None:
        super().__init__(mesh.device)
        self.held = held
        self.collectives: Counter[Call] = Counter()
        self.peak = 0
        self.peak_action: Action | None = None
        self._axes = GroupAxes(mesh)
        self._total = 0
        self._tick = self._peak_tick = 0
        self._action: Action | None = None
        self._live: dict[int, Piece] = {}  # by storage
        self._dead: list[Piece] = []  # freed pieces that may have been alive at the peak
        self._inside = ExitStack()

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """A context for the pipeline's runner: all that is recorded inside belongs to `action`."""
        self._action = action
        yield
        self._ask_holders()
        self._action = None

    def __enter__(self) -> "Tape":
        self._inside.enter_context(watch_resizes(self))
        self._inside.enter_context(listening(self._told))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ask_holders()
        super().__exit__(*error)
        self._inside.close()

    def weights(self, tensors: list[Tensor]) -> None:
        """Add the weights, which are allocated already."""
        for tensor in tensors:
            self.saw(tensor)
            self._told(tensor, WEIGHTS)

    def _told(self, tensor: Tensor, category: str) -> None:
        piece = self._live.get(key_of(tensor))
        if piece is not None:
            piece.label.told = category

    def _ask_holders(self) -> None:
        for category, tensors in reversed(self.held().items()):  # the first category wins
            for tensor in tensors:
                self._told(tensor, category)

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

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            self._heard(func, args)
            if self.device == DEVICE:
                return run_collective(func, args, kwargs)
        return func(*args, **kwargs)

    def born(self, key: int, size: int, label: Label | None = None) -> None:
        self._tick += 1
        self._total += size
        self._live[key] = Piece(size, self._tick, self._action, label or Label())
        if self._total > self.peak:
            self.peak, self._peak_tick, self.peak_action = self._total, self._tick, self._action

    def freed(self, key: int, size: int) -> Label:
        piece = self._live.pop(key)
        self._tick += 1
        self._total -= size
        piece.died, piece.died_in = self._tick, self._action
        if piece.born <= self._peak_tick:
            self._dead.append(piece)
        return piece.label

    def _heard(self, func: Any, args: Any) -> None:
        kind, size = call_of(func, args)
        axis = self._axes.of(group_of(args), kind)
        if axis is None:
            return
        self.collectives[Call(axis, kind, size)] += 1
        if axis in DATA_PARALLEL and kind in BUFFERS:
            for tensor in tensors_of(args):
                piece = self._live.get(key_of(tensor))
                if piece is not None:
                    piece.label.buffer = BUFFERS[kind]


class GroupAxes:
    """Names a group by the view of the mesh with the same ranks (the innermost first), by `world`,
    or by `ends` (the ranks of the first and last stage, for a tied embedding). `cp` and the axes of
    experts are only the names of their own groups, as other axes may have the same ranks. Of all
    ranks there is one group: if they are those of cp, all its collectives are counted over cp; if
    of an axis of experts, over the axis of weights that has them, or else the world."""

    def __init__(self, mesh: Mesh) -> None:
        groups = {name: view.get_group() for name, view in mesh.views().items()}
        own = {axis: groups.pop(axis) for axis in ("cp", *EXPERT_AXES[1:]) if axis in groups}
        world = frozenset(range(mesh.root.size()))
        self._axes = [
            (name, frozenset(dist.get_process_group_ranks(group))) for name, group in groups.items()
        ]
        self._axes.append(("world", world))
        self._known: dict[str, str | None] = {
            group.group_name: axis if group.size() > 1 else None
            for axis, group in own.items()
            if axis == "cp" or group.size() < len(world)
        }

    def of(self, group: dist.ProcessGroup, kind: str = "") -> str | None:
        """The name of the axis of a collective of this kind, or None for a group of one rank.
        Every all-to-all is over ep."""
        if kind == "all_to_all":
            return "ep"
        name = group.group_name
        if name not in self._known:
            ranks = frozenset(dist.get_process_group_ranks(group))
            axis = next((axis for axis, members in self._axes if members == ranks), "ends")
            self._known[name] = axis if len(ranks) > 1 else None
        return self._known[name]
