"""Counts the memory of an optimizer's step that computes with whole matrices: that of Muon
(training/optimizers/muon.py). Other optimizers update weights in place."""

from collections.abc import Generator
from itertools import pairwise
from math import prod

from parallel.memory import TEMPORARY
from parallel.whole_matrices import Round, interleave
from tools.plan.account import Account
from tools.plan.layout import Layout


def count_update(account: Account, layout: Layout) -> None:
    """The optimizer's step, from the end of a rank's program on."""
    new = 0  # bytes of a weight's new momentum, until there is that of the next
    for stage in layout.stages:
        for weight, part in layout.parts(layout.units(stage)):
            if layout.optimizer.takes_whole(weight.spec) and not layout.offloads:
                before, new = new, prod(part) * layout.master
                account.reach({TEMPORARY: before + new})
    account.add(TEMPORARY, new)
    for rounds in layout.rounds():
        interleave(_round(account, layout, each) for each in rounds)
    account.free(TEMPORARY, new)


def _round(account: Account, layout: Layout, each: Round) -> Generator[None, None, None]:
    """A round, in the order of `Round.travel`, which stops in the same places."""
    width = layout.products
    parts = [prod(one.matrix.part(0, one.matrix.hops[0].rank)) for one in each.owned]
    # what the rank holds of the matrices: their gradients, or copies in another dtype
    held = width * sum(parts) if layout.offloads or width != layout.master else 0
    account.add(TEMPORARY, held)
    for leg in each.legs:
        sent, received = width * sum(leg.sent), width * sum(leg.received)
        if not leg.axis.cuts:  # they are there
            yield
            owned = width * leg.sent[leg.axis.rank] if held else 0
            account.free(TEMPORARY, held - owned)
        else:
            account.reach({TEMPORARY: sent + received})
            account.add(TEMPORARY, received)
            yield
            owned = received
            account.add(TEMPORARY, owned)  # joined
            account.free(TEMPORARY, held + received)
        held = owned
    shapes = [one.matrix.shape for one in each.mine]
    results = width * sum(map(prod, shapes))
    squares = width * sum(min(shape) ** 2 for shape in shapes)
    # an iteration's x before and after, its square, and the matrix that multiplies x
    account.reach({TEMPORARY: 2 * (results + squares)})
    account.add(TEMPORARY, results)
    account.free(TEMPORARY, held)
    held = results
    for leg in reversed(each.legs):
        sent, received = width * sum(leg.received), width * sum(leg.sent)
        account.reach({TEMPORARY: sent + received})
        account.add(TEMPORARY, received)
        yield
        account.free(TEMPORARY, held)
        held = received
    if not layout.offloads:
        for before, part in pairwise([0, *parts]):  # the step of a matrix, beside that before
            account.reach({TEMPORARY: layout.master * (before + 3 * part)})
    account.free(TEMPORARY, held)
