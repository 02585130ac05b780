"""What a computation does, recorded while it runs on shapes: operations with their FLOPs and bytes,
collectives and what runs between their start and their wait, storages and how long they live.

    group = dist.ProcessGroup(rank, 8)           talks to nobody, and is registered nowhere
    with AsOnGpu(), Recorder() as recorder:
        with recorder.phase("forward"): …

`Recorder.phases` then has a `Phase` of each name.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from costs.as_on_gpu import DEVICE
from costs.storages import StorageWatch, key_of

COLLECTIVES = {  # operators of torch.distributed, by their names here
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
    "recv_": "receive",
}
BACKWARD_OF_FORWARD = 2.5  # flash attention's operations: five products where forward has two
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}
LOOKUPS = {"embedding", "index", "index_select", "gather"}  # read few rows of their first argument
NO_WORK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}


class Product(NamedTuple):
    """A matrix product."""

    flops: float
    inner: int  # length of the sums
    bytes: int  # read and written


class Attention(NamedTuple):
    """Scores, softmax and weighted sum in one operator, or their backward."""

    flops: float  # of the scores that the mask leaves
    whole_flops: float  # of all S × S


class Moved(NamedTuple):
    """An operation that is as fast as memory."""

    bytes: int


class Sent(NamedTuple):
    """A collective begins."""

    kind: str
    bytes: int  # of the whole tensor: what a gather ends with, what a scatter begins with
    number: int  # of this record


class Waited(NamedTuple):
    """What follows needs the collective's result."""

    number: int


Event = Product | Attention | Moved | Sent | Waited


class Effect(NamedTuple):
    """What a piece of work does to memory, in bytes above what was there when it began."""

    height: int  # the most
    at_height: dict[str, int]  # by category
    changes: dict[str, int]  # in the end


@dataclass(frozen=True)
class Phase:
    """One phase of a record: forward, or a backward, or one of its halves."""

    events: tuple[Event, ...]
    effect: Effect

    @cached_property
    def sends(self) -> Counter[tuple[str, int]]:
        """Collectives by kind and bytes."""
        return Counter((e.kind, e.bytes) for e in self.events if isinstance(e, Sent))

    @property
    def product_flops(self) -> float:
        return sum(e.flops for e in self.events if isinstance(e, Product))

    def attention_flops(self, whole: bool = False) -> float:
        found = [e for e in self.events if isinstance(e, Attention)]
        return sum(e.whole_flops if whole else e.flops for e in found)


@dataclass(slots=True, eq=False)
class Piece:
    """A storage."""

    bytes: int
    born_in: int  # the phase, by number; −1: between phases
    part: str  # what made it, as `Recorder.part` says
    died_in: int = sys.maxsize


class _Work(dist._Work):
    """Of a collective that nobody carries out."""

    def __init__(self, waited: Callable[[], None]) -> None:
        super().__init__()
        self.waited = waited

    def wait(self, timeout: Any = None) -> bool:
        self.waited()
        return True


class Recorder(StorageWatch):
    """Records the calling thread, backward included.

    Args:
        category_of: what a storage was for; asked when all is recorded. None: not to be counted.
    """

    def __init__(self, category_of: Callable[[Piece], str | None]) -> None:
        super().__init__(DEVICE)
        self.category_of, self.part = category_of, ""
        self._names: list[str] = []
        self._events: list[list[Event]] = []
        self._pieces: dict[int, Piece] = {}  # by storage: those that are there
        # of each phase: (piece, bytes more or less, the category if `hand_over` gave it another)
        self._changes: list[list[tuple[Piece, int, str | None]]] = []
        self._phase = -1  # −1: between phases
        self.flow: dict[str, Piece] = {}  # what comes from elsewhere, or goes there, by name
        self._works: list[_Work] = []
        self._closed = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._closed = True

    # --- phases ---

    def begin(self, name: str) -> None:
        self._phase = len(self._names)
        self._names.append(name)
        self._events.append([])
        self._changes.append([])

    def end(self) -> None:
        self._phase = -1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin(name)
        yield
        self.end()

    def phases(self, holding: Collection[str] = ()) -> dict[str, Phase]:
        """What was recorded; as if somebody else held on to these of `flow`."""
        found, held = {}, [self.flow[name] for name in holding if name in self.flow]
        for name, events, changes in zip(self._names, self._events, self._changes, strict=True):
            kept = [change for change in changes if change[0] not in held]
            found[name] = Phase(tuple(events), self._effect(kept))
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
        """Of a tensor whose storage was made inside."""
        return self._pieces[key_of(tensor)]

    def passes(self, name: str, tensor: Tensor) -> None:
        """It comes from elsewhere, or goes there: between phases its life is not this record's."""
        self.flow[name] = self.piece(tensor)

    @property
    def bytes_held(self) -> int:
        return sum(piece.bytes for piece in self._pieces.values())

    def hand_over(self, piece: Piece, category: str) -> None:
        """In the last phase it became something else."""
        self._changes[-1] += [(piece, -piece.bytes, None), (piece, piece.bytes, category)]

    def leave_out(self, *tensors: Tensor) -> None:
        """What is not of this record: weights and inputs."""
        self._sizes |= {key_of(tensor): 0 for tensor in tensors}

    def born(self, key: int, size: int, label: Any = None) -> None:
        self._pieces[key] = piece = Piece(size, self._phase, self.part)
        if self._phase >= 0:
            self._changes[self._phase].append((piece, size, None))

    def freed(self, key: int, size: int) -> None:
        piece, phase = self._pieces.pop(key), self._phase
        if phase < 0 and (self._closed or not self._names or piece in self.flow.values()):
            return
        if phase < 0:  # what dies between phases is the last one's
            phase = len(self._names) - 1
        piece.died_in = phase
        self._changes[phase].append((piece, -size, None))

    # --- operators ---

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            return self._collective(func, args)
        result = func(*args, **kwargs)
        if self._phase >= 0:
            event = event_of(func, args, kwargs, result)
            if event is not None:
                self._events[self._phase].append(event)
        return result

    def _collective(self, func: Any, args: Any) -> Any:
        number, events = len(self._works), self._events[self._phase]
        events.append(Sent(*call_of(func, args), number))
        work = _Work(lambda: self._events[self._phase].append(Waited(number)))
        self._works.append(work)
        returns_tensors = len(func._schema.returns) > 1
        return (args[0], work.boxed()) if returns_tensors else work.boxed()


def call_of(func: Any, args: Any) -> tuple[str, int]:
    """Kind and bytes of a collective: of its largest tensor, which is the whole one."""
    name = func.name().split(".")[0].removeprefix("c10d::")
    return COLLECTIVES.get(name, name), max(tensor.nbytes for tensor in tensors_of(args))


def wire_bytes(kind: str, size: int, ranks: int) -> float:
    """What one rank sends in a ring over `ranks`: all others' parts of a gather or scatter, both of
    an all-reduce."""
    if kind in ("send", "receive"):
        return float(size) if kind == "send" else 0.0
    return size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def event_of(func: Any, args: Any, kwargs: Any, result: Any) -> Event | None:
    """What an operator does; None where it does nothing but name memory."""
    name = func._schema.name.split("::")[-1]
    if func.is_view or name in NO_WORK:
        return None
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    if "query" in named and "key" in named:
        return _attention(named)
    given, made = [*args, *kwargs.values()], list(tensors_of([result]))
    if name in LOOKUPS:
        given[0] = made
    size = sum(t.nbytes for t in tensors_of(given))
    size += sum(t.nbytes for t in made if not any(t is argument for argument in given))
    if name.rstrip("_") in PRODUCTS:  # whose right factor is the last argument
        inner = [t for t in tensors_of(args) if t.dim() >= 2][-1].shape[-2]
        return Product(2.0 * result.numel() * inner, inner, size)
    return Moved(size) if size else None


def tensors_of(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def _attention(named: dict[str, Any]) -> Attention:
    """Of an operator of scaled dot-product attention or its backward: q [B, H, S, E], or [T, H, E]
    of sequences of at most max_q tokens. A bias counts as causal, whatever it hides."""
    q, v = named["query"], named["value"]
    if q.dim() == 4:
        batch, heads, length = q.shape[:3]
        window = (-1, 0 if named.get("is_causal") or named.get("attn_bias") is not None else -1)
    else:
        heads, length = q.shape[1], named["max_q"]
        batch, window = q.shape[0] // length, named["window_size"]
    behind, ahead = (length if side < 0 else side for side in window)
    each = 2.0 * batch * heads * (q.shape[-1] + v.shape[-1])
    is_backward = "grad_out" in named or "grad_out_" in named
    each *= BACKWARD_OF_FORWARD if is_backward else 1.0
    return Attention(each * pairs(length, behind, ahead), each * length**2)


def pairs(length: int, behind: int, ahead: int) -> float:
    """Scores of a sequence whose tokens see so many tokens behind and ahead of them; of a causal
    mask half the square, as it is usual to count (PaLM, appendix B)."""
    if behind >= length:
        sees = length**2 / 2
    else:  # the first tokens have fewer behind them
        sees = length * behind - behind**2 / 2
    return sees * (1 if ahead == 0 else 2)
