"""Which of many parity cases `make test` runs, and the one assertion about a case."""

from dataclasses import replace
from functools import cache

import pytest

from parallel.axes import MeshSizes
from proofs.parity import __main__ as parity
from proofs.parity.cases import Covering, has_axis_of, pairs_of
from proofs.parity.chosen import schedule_cases
from proofs.parity.run import check

# Every schedule with pp 4: in `make test` without another axis, with up to two stages per rank and
# twice as many micro-batches as ranks; in the thorough tests with tp 2, every number of stages and
# four times as many. The whole matrix has the rest.
ROWS = [case for case in schedule_cases((8,)) if case.layout == MeshSizes(pp=4, tp=2)]
DEEP = {
    case.schedule: replace(case, layout=MeshSizes(pp=4))
    for case in ROWS
    if case.stages_per_rank <= 2 and case.num_microbatches == 8
}
DEEPER = [*DEEP.values(), *(case for case in ROWS if case.num_microbatches == 16)]


class Tiers:
    """The cases of a covering array.

    few: some of them, in which every value of every option occurs.
    """

    def __init__(self, found: Covering) -> None:
        self.values, self.impossible = found.values, found.impossible
        self.pairs = {case: pairs_of(case, self.values) for case in found.cases}
        self.few = self._each_value_once()

    def _each_value_once(self):
        """Chosen greedily: the next case has the most new values for its price. A value counts
        only where its option has an effect."""
        values = {case: effective(case, values_of(mine)) for case, mine in self.pairs.items()}
        prices = {case: price(case) for case in values}
        left = set().union(*values.values())
        chosen = []
        while left:
            chosen.append(max(values, key=lambda case: len(values[case] & left) / prices[case]))
            left -= values[chosen[-1]]
        return chosen


SHARED = ("num_kv_heads", "shared by ranks of tp")  # another effect of a value


def effective(case, values):
    """Without the values of options for an axis that the layout does not have."""
    found = {(name, value) for name, value in values if has_axis_of(case.layout, name)}
    return found | {SHARED} if case.layout.tp > case.num_kv_heads else found


def price(case):
    """About how long a step takes: ranks times (building and FSDP, and layers run forward)."""
    layers = case.config().model.num_layers
    return case.world * (4 + layers / case.layout.pp * case.num_microbatches)


def values_of(pairs):
    return {value for pair in pairs for value in pair}


# They take seconds to find. Ranks import this file too, and do not need them.


@cache
def dense_covering() -> Tiers:
    return Tiers(parity.dense_covering(parity.WORLDS, quick=True))


@cache
def expert_covering() -> Tiers:
    return Tiers(parity.expert_covering(parity.WORLDS))


def thorough_but(kept, cases):
    """`cases` as test parameters (a tuple has several), with all that are not in `kept` marked
    thorough."""
    return [
        case
        if case in kept
        else pytest.param(*(case if type(case) is tuple else [case]), marks=pytest.mark.thorough)
        for case in cases
    ]


def agrees(ranks, case, steps=0, **options):
    row = check(ranks, case, steps, **options)
    assert not row.failures(), str(row)
