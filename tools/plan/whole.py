"""Counts the memory around the units of a stage if no rank shares its weights
(parallel/whole.py)."""

from collections.abc import Hashable

from parallel.memory import GATHERED, GRADIENTS, SHARDED_GRADIENTS
from tools.plan.account import Account
from tools.plan.layout import Layout, gathered
from tools.plan.sharded import OUTER


class Whole:
    """The state of a rank's weights: the methods of `Sharded` (sharded.py), for a rank on which
    FSDP is not used."""

    def __init__(self, layout: Layout, account: Account) -> None:
        self.layout, self.account = layout, account
        self.summed: set[tuple[int, int]] = set()  # (stage, index) of units with sums of gradients
        # Weights are copied unless all dtypes are equal, but the copies share the masters' memory
        # if those have the compute dtype.
        self.copies = layout.compute != layout.master

    def begin(self) -> None:
        """Before a step: copies of all weights in the compute dtype are made."""
        if self.copies:
            for stage in self.layout.stages:
                for unit in self.layout.units(stage):
                    self.account.add(GATHERED, unit.numel * self.layout.compute)

    def begun(self, stage: int, index: int) -> bool:
        return (stage, index) in self.summed

    def has_experts(self, stage: int, index: int) -> bool:
        return False  # they are no unit of their own

    def state(self, stage: int) -> Hashable:
        return sum(key[0] == stage for key in self.summed)

    def gather(self, stage: int, index: int, forward: bool, before: int, over: str = OUTER) -> int:
        return 0

    def prefetched(self, stage: int, index: int, over: str = OUTER) -> int:
        return 0

    def after_forward(self, stage: int, index: int, over: str = OUTER) -> None:
        pass

    def after_input_gradient(self, stage: int, index: int, over: str = OUTER) -> None:
        pass

    def after_backward(self, stage: int, index: int, last: bool, over: str = OUTER) -> None:
        """After a unit's backward: its sums, if they are new and in the master dtype, are the
        gradients that the optimizer reads."""
        if (stage, index) not in self.summed and over == OUTER:
            self.summed.add((stage, index))
            if self.layout.sum == self.layout.master:
                self._hand_over(stage, index)

    def _hand_over(self, stage: int, index: int) -> None:
        numbers = self.layout.units(stage)[index].numel
        self.account.free(GRADIENTS, numbers * self.layout.sum)
        self.account.add(SHARDED_GRADIENTS, numbers * self.layout.master)

    def end_last_backward(self, stage: int) -> None:
        """Free a stage's copies, and convert its sums weight by weight."""
        layout, account = self.layout, self.account
        for index, unit in enumerate(layout.units(stage)):
            if self.copies:
                account.free(GATHERED, unit.numel * layout.compute)
            if layout.sum != layout.master:
                widest = max(each.widest for each in gathered(unit))
                account.reach(gradients=widest * layout.master)
                self._hand_over(stage, index)
