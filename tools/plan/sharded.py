"""Counts the memory that FSDP2 uses around the units of a stage, for gathers, copies and reductions
(parallel/data.py)."""

from collections import defaultdict
from collections.abc import Hashable

from parallel.memory import GATHERED, GRADIENTS, REDUCING, SHARDED_GRADIENTS
from tools.plan.account import Account
from tools.plan.layout import Gathered, Layout

# identifies a unit of FSDP: the stage, the first of the stage's units, and the view of the mesh
# over which its weights are sharded
Key = tuple[int, int, str]
OUTER, EXPERTS = "fsdp", "fsdp_ep"


class Sharded:
    """The state of FSDP's units on a rank: which are gathered, and where their gradients are. A
    unit of FSDP is one unit of a stage, or with `fsdp_unit: stage` all units of a stage; experts in
    it are a unit of their own, which is gathered after and reduced before the rest. `over` names
    which of the two is meant."""

    def __init__(self, layout: Layout, account: Account) -> None:
        self.layout, self.account = layout, account
        self.resharding = layout.config.parallel.zero_stage == 3
        # (stage, index of a unit, view) → the FSDP unit that contains it: key, indices, weights
        self.unit_of: dict[Key, tuple[Key, range, Gathered]] = {}
        for stage in layout.stages:
            for indices, unit in layout.fsdp_units(stage):
                key = stage, indices.start, unit.over
                self.unit_of |= {(stage, i, unit.over): (key, indices, unit) for i in indices}
        self.gathered: set[Key] = set()
        self.accumulated: set[Key] = set()  # hold whole gradients
        self.reduced: set[Key] = set()  # hold reduced gradients of some micro-batches
        # by stage: bytes of buffers that FSDP still holds
        self.input_of_reduction: dict[int, int] = defaultdict(int)
        self.outputs_of_reductions: dict[int, int] = defaultdict(int)

    def begin(self) -> None:
        """Before a step: weights are gathered when a unit first needs them."""

    def begun(self, stage: int, index: int) -> bool:
        """Whether a unit's sums have gradients of an earlier micro-batch."""
        return self.unit_of[stage, index, OUTER][0] in self.accumulated

    def has_experts(self, stage: int, index: int) -> bool:
        return (stage, index, EXPERTS) in self.unit_of

    def state(self, stage: int) -> Hashable:
        """A stage's state between two actions. Counts suffice, because then all units of the stage
        are gathered or none, and so on."""
        counts = [
            sum(key[0] == stage for key in keys)
            for keys in (self.gathered, self.accumulated, self.reduced)
        ]
        return (*counts, self.input_of_reduction[stage], self.outputs_of_reductions[stage])

    def gather(self, stage: int, index: int, forward: bool, before: int, over: str = OUTER) -> int:
        """Before a unit's forward or backward, gather the weights of the FSDP unit that contains
        it.

        `before`: bytes of the previous gather's buffer, which FSDP holds until the next gather has
        allocated its own. Returns the bytes of this gather's buffer.
        """
        layout, (key, _, unit) = self.layout, self.unit_of[stage, index, over]
        if key in self.gathered:
            return before
        shards = layout.sharding[over].shards
        size = unit.padded(shards) * layout.compute
        buffer = size if shards > 1 else 0
        copied = layout.compute != layout.master and shards > 1
        flat = size // shards if copied else 0
        if forward:
            self.account.reach(gathering=before + buffer + flat)
        self.account.add(GATHERED, size)
        # experts that are cut are put together from a second copy
        self.account.reach(gathering=buffer + unit.cut_within(shards) * layout.compute)
        self.gathered.add(key)
        return buffer

    def prefetched(self, stage: int, index: int, over: str = OUTER) -> int:
        """Bytes gathered during a unit's backward for the FSDP unit whose backward comes next: the
        experts in it, or the unit before."""
        if over == OUTER and self.has_experts(stage, index):
            return self._prefetched((stage, index, EXPERTS))
        start = self.unit_of[stage, index, OUTER][1].start
        return self._prefetched((stage, start - 1, OUTER)) if start else 0

    def _prefetched(self, which: Key) -> int:
        key, _, unit = self.unit_of[which]
        shards = self.layout.sharding[unit.over].shards
        if not self.resharding or shards == 1 or key in self.gathered:
            return 0
        return unit.padded(shards) * self.layout.compute

    def after_forward(self, stage: int, index: int, over: str = OUTER) -> None:
        if self.resharding and index + 1 == self.unit_of[stage, index, over][1].stop:
            self._reshard(stage, index, over)

    def after_input_gradient(self, stage: int, index: int, over: str = OUTER) -> None:
        if self.resharding and index == self.unit_of[stage, index, over][1].start:
            self._reshard(stage, index, over)

    def _reshard(self, stage: int, index: int, over: str) -> None:
        key, _, unit = self.unit_of[stage, index, over]
        if key in self.gathered:
            self.gathered.remove(key)
            shards = self.layout.sharding[over].shards
            self.account.free(GATHERED, unit.padded(shards) * self.layout.compute)

    def after_backward(self, stage: int, index: int, last: bool, over: str = OUTER) -> None:
        """After the backward of the last unit within an FSDP unit, reduce its gradients, or keep
        them until the last backward."""
        layout, (key, indices, unit) = self.layout, self.unit_of[stage, index, over]
        if index != indices.start:
            return
        zero = layout.config.parallel.zero_stage
        if zero == 3 or last:
            self._reshard(stage, index, over)
        if last or zero >= 2:
            self._reduce(stage, key, unit, last)
        else:
            self.accumulated.add(key)

    def _reduce(self, stage: int, key: Key, unit: Gathered, last: bool) -> None:
        """Reduce over the shards. The last reduction of a step also reduces over the replicas and
        converts to the weights' dtype; until then FSDP sums in reduce_dtype."""
        layout, account = self.layout, self.account
        shards = layout.sharding[unit.over].shards
        self.accumulated.discard(key)
        account.free(REDUCING, self.input_of_reduction.pop(stage, 0))
        numbers = unit.padded(shards)
        account.add(REDUCING, numbers * layout.reduce)
        self.input_of_reduction[stage] = numbers * layout.reduce
        account.free(GRADIENTS, unit.numel * layout.sum)
        part = numbers // shards
        output, final = part * layout.reduce, part * layout.master
        # With one shard (replicas only), FSDP divides the gradients by 1, into a copy.
        account.reach(reducing=output + (numbers * layout.reduce if shards == 1 else 0))
        if not last:
            if key not in self.reduced:
                account.add(SHARDED_GRADIENTS, output)
                self.reduced.add(key)
            return
        # the output of the reduction over replicas is held until the stage's backward ends
        if layout.master != layout.reduce:
            account.add(REDUCING, output)
            self.outputs_of_reductions[stage] += output
        account.add(SHARDED_GRADIENTS, final)
        if key in self.reduced:
            account.free(SHARDED_GRADIENTS, output)
            self.reduced.remove(key)

    def end_last_backward(self, stage: int) -> None:
        held = self.input_of_reduction.pop(stage, 0) + self.outputs_of_reductions.pop(stage, 0)
        self.account.free(REDUCING, held)
