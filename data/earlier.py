"""How a data stage continues those before it (settings/data_stages.py).

    0   web 0.9, code 0.1   S = 8192     web 0 … 8999, code 0 … 999      of each source's
    1   web 0.5, long 0.5   S = 8192     web 9000 …,   long 0 …          own samples
    2   web 0.5, long 0.5   S = 131072   web 0 …,      long 0 …

In each, samples are counted from 0, and so are the samples of a source that is new, or whose
windows have another length than before. A source that was read in windows of the same length
continues where it was left: the same epochs, in the same permutations, so that within an epoch no
window is read twice. All of this follows from the mixtures and from where each data stage ended.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from data.dataset import Mixture
from data.sampler import MIXTURE_PERIOD, mixture_pattern


@dataclass(frozen=True)
class Earlier:
    """An earlier data stage: it has passed the samples before `samples` of `data`, in windows of
    `seq_len` tokens."""

    data: Mixture
    seq_len: int
    samples: int


def continued(
    data: Mixture, seq_len: int, earlier: Sequence[Earlier]
) -> tuple[list[int], list[int]]:
    """For each source of `data`: its number in the run, which decides its permutations, and how
    many of its samples the earlier stages have passed. Without earlier stages: (0, 1, …), zeros."""
    numbers: dict[tuple[str, int, int], int] = {}
    passed: Counter[int] = Counter()
    for stage in earlier:
        mine = _numbers(stage.data, stage.seq_len, numbers)
        for number, count in zip(mine, counts(stage.data.weights, stage.samples), strict=True):
            passed[number] += count
    mine = _numbers(data, seq_len, numbers)
    return mine, [passed[number] for number in mine]


def counts(weights: Sequence[float], samples: int) -> list[int]:
    """How many of the first `samples` samples of a mixture come from each source."""
    source_of, _, quota = mixture_pattern(weights)
    periods, rest = divmod(samples, MIXTURE_PERIOD)
    found = Counter(source_of[:rest].tolist())
    return [periods * int(in_period) + found[s] for s, in_period in enumerate(quota)]


def _numbers(data: Mixture, seq_len: int, known: dict[tuple[str, int, int], int]) -> list[int]:
    """The number of each source in the run. A new one is added to `known`; a source is known by its
    content and the length of its windows (and one that a mixture names twice, by which of them)."""
    seen: Counter[str] = Counter()
    found = []
    for source in data.sources:
        key = (source.checksum, seq_len, seen[source.checksum])
        seen[source.checksum] += 1
        found.append(known.setdefault(key, len(known)))
    return found
