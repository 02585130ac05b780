"""Locates the tokens of sample i of a run: a pure function of (seed, i), in constant memory.

    sample i  --mixture-->  (source, k): the k-th sample of that source
              --epochs-->   epoch = k // n, position = k % n         n = windows of that source
              --shuffle-->  window = permutation of range(n), keyed by (seed, source, epoch),
                            at `position`
              --cut-->      tokens[window * S : window * S + S + 1]: the first S are the inputs,
                            the last S the targets

So within an epoch every window is read once, and no token is a target twice. (The first token of a
split is never a target, and fewer than S tokens at its end are never read.) Neither the number of
processes nor the batch size matters here: they only determine which process reads sample i, and in
which batch.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from errors import UserError

ROUNDS = 8
# samples after which the mixture's pattern repeats; the resolution of weights is its inverse
MIXTURE_PERIOD = 100_000


class Permutation:
    """A bijection on range(n), chosen by a key; each point is computed without the others.

    A Feistel network permutes pairs (left, right) for any round function, because each round only
    adds a function of one half to the other half (Luby & Rackoff 1988). Here left is in range(a),
    right is in range(b), and additions are modulo a and b in turn, so that the network permutes
    range(a * b), where a * b >= n. An image outside range(n) is permuted again until it falls
    inside, which gives a bijection on range(n) ("generalized Feistel" and "cycle walking": Black &
    Rogaway 2002). With a = ceil(sqrt(n)) and b = ceil(n / a), fewer than a points lie outside, so
    repetitions are rare.

    Args:
        n: 1 <= n < 2**62.
        key: any text; different keys give different permutations.
    """

    def __init__(self, n: int, key: str) -> None:
        self.n = n
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """The images of `points`, in range(n): [N] integers -> [N] uint64."""
        images = self._encipher(points.astype(np.uint64))
        outside = np.flatnonzero(images >= self.n)
        while outside.size:
            images[outside] = self._encipher(images[outside])
            outside = outside[images[outside] >= self.n]
        return images

    def _encipher(self, points: np.ndarray) -> np.ndarray:
        """Applies the Feistel network, a bijection on range(a * b): [N] uint64 -> [N] uint64."""
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = points // b, points % b
        for round_index in range(0, ROUNDS, 2):
            left = (left + _mix(right ^ self._round_keys[round_index]) % a) % a
            right = (right + _mix(left ^ self._round_keys[round_index + 1]) % b) % b
        return left * b + right


def _mix(x: np.ndarray) -> np.ndarray:
    """A hash of 64 bits to 64 bits: SplitMix64's finalizer (Steele, Lea & Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=256)  # a batch uses one permutation per source, or two where an epoch ends
def _epoch_permutation(n: int, seed: int, source: int, epoch: int) -> Permutation:
    return Permutation(n, f"seed {seed} source {source} epoch {epoch}")


def mixture_pattern(weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One period of a mixture: source_of, rank_of ([MIXTURE_PERIOD]), quota ([sources]), all int64.

    Slot t holds sample number rank_of[t] (within the period) of source source_of[t]. Quotas are the
    weights rounded by the largest-remainder method, so that they add up to the period exactly. The
    ideal position of the j-th sample of a source with quota q is (j + 1/2) / q of the period.
    Sorting by ideal position spreads every source evenly, so that the mixture's proportions hold in
    every stretch of the run, not only on average.

    Weights are positive. Raises UserError if one is too small for the period.
    """
    shares = np.array(weights, dtype=np.float64)
    shares = shares / shares.sum() * MIXTURE_PERIOD
    quota = np.floor(shares + 1e-6).astype(np.int64)  # 0.29 * 100000 is 28999.999999999996
    largest_remainders = np.argsort(-(shares - quota), kind="stable")
    quota[largest_remainders[: MIXTURE_PERIOD - quota.sum()]] += 1
    if np.any(quota == 0):
        why = (
            f"a weight is below 1/{MIXTURE_PERIOD} of the mixture: that source would never be read"
        )
        remedy = "raise that weight, or leave the source out"
        raise UserError("data.path", list(weights), why, remedy)
    sources = np.repeat(np.arange(len(quota)), quota)
    ranks = np.concatenate([np.arange(q) for q in quota])
    order = np.argsort((ranks + 0.5) / quota[sources], kind="stable")
    return sources[order], ranks[order], quota


def counts(weights: Sequence[float], samples: int) -> list[int]:
    """How many of the first `samples` samples of a mixture come from each source."""
    source_of, _, quota = mixture_pattern(weights)
    periods, rest = divmod(samples, MIXTURE_PERIOD)
    found = Counter(source_of[:rest].tolist())
    return [periods * int(in_period) + found[s] for s, in_period in enumerate(quota)]


class SampleOrder:
    """Maps a sample index to (source, epoch, window) for a mixture of sources.

    Args:
        num_windows: number of windows of each source, all >= 1.
        weights: weight of each source.
        seed: seed of the shuffle.
        shuffle: False reads every source's windows in order.
        numbers: number of each source in the run, for its permutations; None: its place here.
        passed: how many samples of each source the run has passed before; None: none.
    """

    def __init__(
        self,
        num_windows: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
        numbers: Sequence[int] | None = None,
        passed: Sequence[int] | None = None,
    ) -> None:
        self.num_windows = list(num_windows)
        self.seed, self.shuffle = seed, shuffle
        self._source_of, self._rank_of, self._quota = mixture_pattern(weights)
        self._numbers = numbers or range(len(self._quota))
        self._passed = np.array(passed or np.zeros_like(self._quota), dtype=np.int64)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Locates `samples` ([N] int64, >= 0): (source, epoch, window), each [N] int64."""
        samples = np.asarray(samples, dtype=np.int64)
        period, slot = samples // MIXTURE_PERIOD, samples % MIXTURE_PERIOD
        source = self._source_of[slot]
        # number of this source's samples before this one
        nth = period * self._quota[source] + self._rank_of[slot] + self._passed[source]
        epoch, window = np.empty_like(nth), np.empty_like(nth)
        for s in np.unique(source):
            mine = source == s
            epoch[mine], window[mine] = np.divmod(nth[mine], self.num_windows[s])
            if self.shuffle:
                for e in np.unique(epoch[mine]):
                    here = mine & (epoch == e)
                    window[here] = _epoch_permutation(
                        self.num_windows[s], self.seed, self._numbers[s], int(e)
                    )(window[here])
        return source, epoch, window


def count_windows(num_tokens: int, seq_len: int) -> int:
    """Number of windows of seq_len inputs and seq_len targets in num_tokens tokens. Neighbouring
    windows share one token."""
    return max(num_tokens - 1, 0) // seq_len


def merge_ranges(ranges: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Sorts half-open ranges of sample indices, merges those that overlap or touch, and drops empty
    ones."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted((int(begin), int(end)) for begin, end in ranges if begin < end):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def next_samples(
    first: int, count: int, skipped: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, int]:
    """The first `count` sample indices >= `first` outside the skipped ranges, and the index at
    which the following batch begins.

    skipped: ranges as returned by `merge_ranges`.
    """
    pieces, position = [], first
    for begin, end in skipped:
        if position >= end:
            continue
        taken = min(max(begin - position, 0), count)
        pieces.append(np.arange(position, position + taken, dtype=np.int64))
        count -= taken
        position += taken
        if count == 0:
            break
        position = end
    pieces.append(np.arange(position, position + count, dtype=np.int64))
    return np.concatenate(pieces), position + count
