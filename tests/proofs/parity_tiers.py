"""Which of many parity cases `make test` runs, and the assertions about a case."""

from functools import cache
from unittest.mock import patch

import pytest

from proofs.parity import __main__ as parity
from proofs.parity.cases import Covering, has_axis_of, pairs_of
from proofs.parity.run import check


class Tiers:
    """The cases of a covering array.

    few: some of them, in which every value of every option occurs.
    """

    def __init__(self, found: Covering) -> None:
        self.values, self.impossible = found.values, found.impossible
        self.pairs = {case: pairs_of(case, self.values) for case in found.cases}
        # without the values of options for an axis that the case's layout lacks
        self.effective = {
            case: {each for pair in pairs for each in pair if has_axis_of(case.layout, each[0])}
            for case, pairs in self.pairs.items()
        }
        self.few = self._each_value_once()

    def _each_value_once(self):
        """Chosen greedily: the next case has the most new values for its price. Then those are
        left out, the dearest first, whose values all the others have."""
        values = self.effective
        left = set().union(*values.values())
        chosen = []
        while left:
            chosen.append(max(values, key=lambda case: len(values[case] & left) / case.price))
            left -= values[chosen[-1]]
        for case in sorted(chosen, key=lambda case: case.price, reverse=True):
            others = [values[other] for other in chosen if other != case]
            if values[case] <= set().union(*others):
                chosen.remove(case)
        return chosen


# They take seconds to find. Ranks import this file too, and do not need them.


@cache
def dense_covering() -> Tiers:
    return Tiers(parity.dense_covering(parity.WORLDS, quick=True))


@cache
def expert_covering() -> Tiers:
    return Tiers(parity.expert_covering(parity.WORLDS))


def thorough_but(kept, cases, slow=()):
    """`cases` as test parameters (a tuple has several), with all that are not in `kept` marked
    thorough, or slow: those that only `make parity` and test_whole_matrix need to run."""
    return [
        case
        if case in kept
        else pytest.param(
            *(case if type(case) is tuple else [case]),
            marks=pytest.mark.slow if case in slow else pytest.mark.thorough,
        )
        for case in cases
    ]


def agrees(ranks, case, steps=1):
    row = check(ranks, case, steps)
    assert not row.failures(), str(row)


def strictly(ranks, backend="strict"):
    """The pool's tasks get a process group that orders communication as NCCL does."""
    return patch.multiple(ranks, backend=backend, timeout=200.0)


def is_found(row, where, parameter=""):
    """A planted mistake shows in these quantities, and the worst gradient is that of an affected
    parameter. A mistake that changes no gradient shows in no other quantity but the update."""
    found = set(row.failures())
    assert where <= found, row.crash or found
    assert "gradient" in where or found - where <= {"updated"}, found
    assert parameter in row.worst
