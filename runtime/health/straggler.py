"""Which ranks are slow, from the times that all ranks measured for the same work.

In each logged interval, every rank states how long its products took (slow_ranks.py). A rank's
*excess* is its time divided by the median time of its peers, the other ranks of the same pipeline
stage, whose products have the same sizes. (The code computes with its logarithm.) What makes all
ranks slower, such as another sequence length, does not change it. A rank without peers has none.

A rank is named once its excess was above the limit, and above NOISE times the noise, in CONSECUTIVE
intervals in a row. It is named no longer once its excess was below the limit in as many. The noise
is estimated from how much the excess of a rank changes from one interval to the next: the upper
quartile of the changes' absolute values, times what makes it a standard deviation if they are
normally distributed; of this rank or of all ranks, whichever is larger. A rank that stays slow, and
one step up or down, do not count as noise. While few changes are known, more noise is assumed.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONSECUTIVE = 3  # intervals
NOISE = 4.0
RECENT = 32  # intervals from which the noise is estimated
FEW = 8  # changes of one rank from which its own noise is not estimated
QUANTILE = 0.75
# of the difference of two values with standard deviation 1, whose quantile 0.75 is 1.1503 · √2
DEVIATION = 1 / (1.1503 * math.sqrt(2))


@dataclass(frozen=True)
class Slow:
    """A slow rank."""

    rank: int
    factor: float  # its time divided by that of its peers
    since: int  # the logged step at the end of its first slow interval


class Judge:
    """Collects the times of all ranks and names the slow ones.

    Args:
        roles: the role of each rank. Times are compared only between ranks of the same role.
        limit: the least factor at which a rank is named, above 1.
    """

    def __init__(self, roles: Sequence[int], limit: float) -> None:
        self.limit = math.log(limit)
        self.members = [np.flatnonzero(np.array(roles) == role) for role in sorted(set(roles))]
        self.slow: dict[int, Slow] = {}  # by rank
        self.slowest = 1.0  # the largest factor of the last interval
        self._excess: deque[np.ndarray] = deque(maxlen=RECENT)
        self._steps: deque[int] = deque(maxlen=CONSECUTIVE)

    def add(self, step: int, times: Sequence[float]) -> tuple[list[Slow], list[Slow]]:
        """Add the times of all ranks in the interval that ended with `step`, in any unit. Returns
        the ranks that are slow from now on, and those that no longer are."""
        log = np.log(np.maximum(np.array(times, dtype=np.float64), 1e-9))
        excess = np.zeros(len(log))
        for ranks in self.members:
            if len(ranks) > 1:
                excess[ranks] = log[ranks] - median_of_others(log[ranks])
        self._excess.append(excess)
        self._steps.append(step)
        self.slowest = math.exp(max(0.0, float(excess.max())))
        if len(self._steps) < CONSECUTIVE:
            return [], []
        last = np.stack(list(self._excess)[-CONSECUTIVE:])  # [CONSECUTIVE, ranks]
        least, middle = last.min(axis=0), np.median(last, axis=0)
        named = np.flatnonzero(least > np.maximum(self.limit, NOISE * self._noise()))
        began = []
        for rank in named.tolist():
            known = self.slow.get(rank)
            since = self._steps[0] if known is None else known.since
            self.slow[rank] = Slow(rank, math.exp(middle[rank]), since)
            began += [self.slow[rank]] if known is None else []
        refuted = last.max(axis=0) < self.limit
        ended = [slow for rank, slow in self.slow.items() if refuted[rank]]
        for slow in ended:
            del self.slow[slow.rank]
        return began, ended

    def _noise(self) -> np.ndarray:
        """The noise of each rank's excess, [ranks]."""
        changes = np.abs(np.diff(np.stack(self._excess), axis=0))  # [intervals − 1, ranks]
        of_all = np.quantile(changes, QUANTILE) * (1 + 2 / len(changes))
        if len(changes) < FEW:
            return np.full(changes.shape[1], of_all * DEVIATION)
        of_each: np.ndarray = np.quantile(changes, QUANTILE, axis=0)
        return np.maximum(of_each, of_all) * DEVIATION


def median_of_others(values: np.ndarray) -> np.ndarray:
    """For each of n ≥ 2 values, the median of the others."""
    order = np.argsort(values, kind="stable")
    ordered, place = values[order], np.empty(len(values), dtype=np.int64)
    place[order] = np.arange(len(values))  # of each value in the order
    others = len(values) - 1
    # the j-th of the others is the j-th of all, or the one after it if this value comes before
    low, high = ((j + (place <= j)) for j in ((others - 1) // 2, others // 2))
    middle: np.ndarray = (ordered[low] + ordered[high]) / 2
    return middle
