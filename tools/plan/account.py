"""Counts bytes by category, and finds their peak."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cached_property

from costs.recorder import Effect
from parallel.memory import ACTIVATIONS, CATEGORIES, GATHERING, GRADIENTS, REDUCING
from parallel.pipeline.actions import Action


class Account:
    """Bytes that are allocated now, and their `peak`. `peak_action` is the action in which the peak
    occurred, or None if it was between actions or after the last."""

    def __init__(self) -> None:
        self.now: dict[str, int] = defaultdict(int)
        self.total = self.peak = 0
        self.action: Action | None = None
        self.peak_action: Action | None = None
        self._at_peak: dict[str, int] = {}
        self._effects: dict[Hashable, Effect] = {}

    def add(self, category: str, size: int) -> None:
        self.now[category] += size
        self.total += size
        self.reach()

    def free(self, category: str, size: int) -> None:
        self.now[category] -= size
        self.total -= size

    def reach(self, *, gradients: int = 0, gathering: int = 0, reducing: int = 0) -> None:
        """Update the peak for a moment at which these bytes are alive in addition: whole gradients,
        buffers of gathers and of reductions."""
        total = self.total + gradients + gathering + reducing
        if total > self.peak:
            self.peak, self.peak_action = total, self.action
            self._at_peak = dict(self.now)
            more = {GRADIENTS: gradients, GATHERING: gathering, REDUCING: reducing}
            for category, size in more.items():
                if size:
                    self._at_peak[category] = self._at_peak.get(category, 0) + size

    def repeat(self, state: Callable[[], Hashable], work: Callable[[], None]) -> None:
        """Do the work; or, if it was done before in the same state and left the state unchanged,
        apply its recorded effect.

        Most of a program's actions are repetitions, so a long program takes hardly longer than a
        short one.
        """
        before = state()
        if before not in self._effects:
            effect = self._watch(work)
            if state() == before:
                self._effects[before] = effect
            return
        self.apply(self._effects[before])

    def apply(self, effect: Effect) -> None:
        """Apply the effect of a recorded piece of work to this account."""
        height, at_height, changes = effect
        if self.total + height > self.peak:
            self.peak, self.peak_action = self.total + height, self.action
            self._at_peak = {c: self.now[c] + at_height.get(c, 0) for c in {*self.now, *at_height}}
        for category, size in changes.items():
            self.now[category] += size
            self.total += size

    def _watch(self, work: Callable[[], None]) -> Effect:
        began, total = dict(self.now), self.total
        peak, peak_action, at_peak = self.peak, self.peak_action, self._at_peak
        self.peak = -1
        self.reach()
        work()
        at_height = {c: size - began.get(c, 0) for c, size in self._at_peak.items()}
        changes = {
            c: size - began.get(c, 0) for c, size in self.now.items() if size != began.get(c, 0)
        }
        effect = Effect(self.peak - total, at_height, changes)
        if self.peak <= peak:
            self.peak, self.peak_action, self._at_peak = peak, peak_action, at_peak
        return effect

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak, by category."""
        table: dict[str, int] = {}
        for name, size in self._at_peak.items():
            category = name if name in CATEGORIES else ACTIVATIONS
            table[category] = table.get(category, 0) + size
        return table

    @cached_property
    def activations(self) -> dict[str, int]:
        """Bytes of activations at the peak, by the part of a unit that keeps them, largest first.
        Their sum is the value of ACTIVATIONS in `at_peak`."""
        kinds = {n: size for n, size in self._at_peak.items() if n not in CATEGORIES and size}
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))
