"""Records a computation while it runs on meta tensors: its operations with their FLOPs and bytes,
its collectives and what runs between their start and their wait, its storages and their lifetimes.

    group = silent_group("tp", rank, 8)
    with AsOnGpu(), Recorder(category_of) as recorder:
        with recorder.phase("forward"): …

`recorder.phases()` then returns a `Phase` for each name.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from costs.as_on_gpu import DEVICE
from costs.collectives import Call, Work, call_of, group_of, returned
from costs.events import Attention, Event, Product, Sent, Waited, event_of
from costs.storages import StorageWatch, key_of


class Effect(NamedTuple):
    """The effect of a piece of work on memory, in bytes relative to its beginning."""

    height: int  # the peak
    at_height: dict[str, int]  # at the peak, by category
    changes: dict[str, int]  # at the end, by category


@dataclass(frozen=True)
class Phase:
    """One phase of a record: forward, backward, or one half of a split backward."""

    events: tuple[Event, ...]
    effect: Effect
    # the same in parts, between the phase's marks
    effects: tuple[Effect, ...]
    parts: tuple[tuple[Event, ...], ...]

    @cached_property
    def sends(self) -> Counter[Call]:
        """The collectives, each with its count."""
        return Counter(e.call for e in self.events if isinstance(e, Sent))

    @property
    def product_flops(self) -> float:
        return sum(e.flops for e in self.events if isinstance(e, Product))

    def attention_flops(self, whole: bool = False) -> float:
        found = [e for e in self.events if isinstance(e, Attention)]
        return sum(e.whole_flops if whole else e.flops for e in found)


@dataclass(slots=True, eq=False)
class Piece:
    """One storage."""

    bytes: int
    born_in: int  # the number of the phase; −1: between phases
    of_unit: bool  # the value of `Recorder.of_unit` when it was allocated
    died_in: int = sys.maxsize


@dataclass(slots=True, eq=False)
class _Open:
    """What was recorded of one phase."""

    name: str
    events: list[Event] = field(default_factory=list)
    # (piece, change in bytes, the category if `hand_over` assigned one)
    changes: list[tuple[Piece, int, str | None]] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)  # numbers of changes and of events


class Recorder(StorageWatch):
    """Records what the calling thread computes, backward included.

    Args:
        category_of: returns the category of a storage, or None if it is not to be counted; called
            when the recording is complete.
    """

    def __init__(self, category_of: Callable[[Piece], str | None]) -> None:
        super().__init__(DEVICE)
        self.category_of = category_of
        self.of_unit = True  # whether what the first phase does now is a part of its record
        self._phases: list[_Open] = []
        self._phase = -1  # −1: between phases
        self._pieces: dict[int, Piece] = {}  # the storages that are alive, by key
        self.flow: dict[str, Piece] = {}  # inputs and outputs of the recorded part, by name
        self._works: list[Work] = []
        self._closed = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._closed = True

    # --- phases ---

    def begin(self, name: str) -> None:
        self._phase = len(self._phases)
        self._phases.append(_Open(name))

    def mark(self) -> None:
        """Divide the phase here (`Phase.effects`, `Phase.parts`)."""
        phase = self._phases[self._phase]
        phase.marks.append((len(phase.changes), len(phase.events)))

    @property
    def marks(self) -> int:
        """How often the phase is divided already."""
        return len(self._phases[self._phase].marks)

    def end(self) -> None:
        self._phase = -1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin(name)
        yield
        self.end()

    def phases(self, holding: Collection[str] = ()) -> dict[str, Phase]:
        """The recorded phases by name. The storages of `flow` that `holding` names do not count, as
        if other code kept them alive throughout."""
        found, held = {}, [self.flow[name] for name in holding if name in self.flow]
        for one in self._phases:
            events, changes = one.events, one.changes
            each = [*pairwise(((0, 0), *one.marks, (len(changes), len(events))))]
            parts = [
                [change for change in changes[begin[0] : end[0]] if change[0] not in held]
                for begin, end in each
            ]
            effect = self._effect([change for part in parts for change in part])
            effects = tuple(map(self._effect, parts)) if one.marks else (effect,)
            divided = tuple(tuple(events[begin[1] : end[1]]) for begin, end in each)
            found[one.name] = Phase(tuple(events), effect, effects, divided)
        return found

    def _effect(self, changes: list[tuple[Piece, int, str | None]]) -> Effect:
        now: dict[str, int] = defaultdict(int)
        total = height = 0
        at_height: dict[str, int] = {}
        for piece, size, other in changes:
            category = other or self.category_of(piece)
            if category is None:
                continue
            now[category] += size
            total += size
            if total > height:
                height, at_height = total, dict(now)
        return Effect(height, at_height, {c: size for c, size in now.items() if size})

    # --- storages ---

    def piece(self, tensor: Tensor) -> Piece:
        """The piece of a tensor whose storage was allocated during the recording."""
        return self._pieces[key_of(tensor)]

    def passes(self, name: str, tensor: Tensor) -> None:
        """Register `tensor` as an input or output of the recorded part: if its storage is freed
        between phases, that is not counted."""
        self.flow[name] = self.piece(tensor)

    @property
    def bytes_held(self) -> int:
        return sum(piece.bytes for piece in self._pieces.values())

    def hand_over(self, piece: Piece, category: str) -> None:
        """Record that the piece changed to another category at the end of the last phase."""
        changes = [(piece, -piece.bytes, None), (piece, piece.bytes, category)]
        self._phases[-1].changes += changes

    def leave_out(self, *tensors: Tensor) -> None:
        """Do not record the storages of these tensors (weights and inputs)."""
        self._sizes |= {key_of(tensor): 0 for tensor in tensors}

    def born(self, key: int, size: int) -> None:
        self._pieces[key] = piece = Piece(size, self._phase, self.of_unit)
        if self._phase >= 0:
            self._phases[self._phase].changes.append((piece, size, None))

    def freed(self, key: int, size: int) -> None:
        piece, phase = self._pieces.pop(key), self._phase
        if phase < 0:  # a storage freed between phases counts for the phase before
            if self._closed or not self._phases or piece in self.flow.values():
                return
            phase = len(self._phases) - 1
        piece.died_in = phase
        self._phases[phase].changes.append((piece, -size, None))

    # --- operators ---

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            return self._collective(func, args)
        result = func(*args, **kwargs)
        counts = self._phase >= (0 if self.of_unit else 1)
        if counts and (event := event_of(func, args, kwargs, result)) is not None:
            self._phases[self._phase].events.append(event)
        return result

    def _collective(self, func: Any, args: Any) -> Any:
        number, axis = len(self._works), group_of(args).group_desc
        sent = Sent(Call(axis, *call_of(func, args)), number)
        self._phases[self._phase].events.append(sent)
        work = Work(lambda: self._phases[self._phase].events.append(Waited(number)))
        self._works.append(work)
        return returned(func, args, work)
