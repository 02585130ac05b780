"""Which of many parity cases the first tier of tests runs."""

import pytest

from parallel.axes import MeshSizes
from tools.parity.chosen import schedule_cases

# Every schedule with pp 4 and tp 2: in `make test` with up to two stages per rank and twice as many
# micro-batches as ranks; in the thorough tests with every number of stages and four times as many.
# The whole matrix has the rest.
ROWS = [case for case in schedule_cases((8,)) if case.layout == MeshSizes(pp=4, tp=2)]
DEEP = {
    case.schedule: case for case in ROWS if case.stages_per_rank <= 2 and case.num_microbatches == 8
}
DEEPER = [*DEEP.values(), *(case for case in ROWS if case.num_microbatches == 16)]


def values_of(pairs):
    return {value for pair in pairs for value in pair}


def each_value_once(pairs):
    """A few cases, in which every value of every option occurs. They are chosen greedily: the next
    is the case with the most new values.

    pairs: of all cases, their pairs of option values.
    """
    values = {case: values_of(mine) for case, mine in pairs.items()}
    left = set().union(*values.values())
    chosen = []
    while left:
        chosen.append(max(values, key=lambda case: len(values[case] & left)))
        left -= values[chosen[-1]]
    return chosen


def thorough_but(kept, cases):
    """`cases` as test parameters, with all that are not in `kept` marked thorough."""
    return [
        case if case in kept else pytest.param(case, marks=pytest.mark.thorough) for case in cases
    ]
