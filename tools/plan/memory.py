"""Counts the bytes on one rank through a whole step, and their peak on every pipeline rank.

    Account    bytes by category, and their peak
    Sharded    what FSDP2 allocates around units: gathers, copies, reductions (parallel/data.py)
    Whole      what is allocated instead where no rank shares the weights (parallel/whole.py)
    Memory     a rank's program, in the order of parallel/pipeline/runner.py, unit by unit
    peaks      the peak of every pipeline rank, in a step with few micro-batches

What a unit's forward or backward keeps and frees, and its peak, are recorded from its code
(costs/units.py). To these the others add the weights and their gradients, the messages of the
pipeline, and the permanent states.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial

from costs.recorder import Effect, Phase
from costs.units import HIDDEN, POSITIONS, TEMPORARY, position_bytes
from parallel.memory import (
    ACTIVATIONS,
    CATEGORIES,
    GATHERED,
    GATHERING,
    GRADIENTS,
    MESSAGES,
    MOMENTS,
    REDUCING,
    SHARDED_GRADIENTS,
    WEIGHTS,
)
from parallel.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Kind,
)
from parallel.pipeline.lower import Exchange, Program, lower, need_of, result_of
from tools.plan.layout import Gathered, Layout, gathered, schedule_of


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
            self._at_peak = {c: self.now[c] + at_height.get(c, 0) for c in self.now | at_height}
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


# identifies a unit of FSDP: the stage, the first of the stage's units, and the view of the mesh
# over which its weights are sharded
Key = tuple[int, int, str]
OUTER, EXPERTS = "fsdp", "fsdp_ep"


# --- around the units ---


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


class Whole(Sharded):
    """The same on a rank whose weights no other rank shares, where FSDP is not used: nothing is
    gathered or reduced. Copies of the weights live from the first action of a step to a stage's
    last backward."""

    def __init__(self, layout: Layout, account: Account) -> None:
        super().__init__(layout, account)
        self.gathered, self.resharding = {key for key, _, _ in self.unit_of.values()}, False
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
        return (stage, index, OUTER) in self.accumulated

    def after_backward(self, stage: int, index: int, last: bool, over: str = OUTER) -> None:
        """After a unit's backward: its sums, if they are new and in the master dtype, are the
        gradients that the optimizer reads."""
        if over == OUTER and not self.begun(stage, index):
            self.accumulated.add((stage, index, OUTER))
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


# --- a rank's program ---


class Memory(Account):
    """The memory of one rank: `peak` bytes, `at_peak` by category, `activations` by kind, and the
    `peak_action`."""

    def __init__(self, layout: Layout, program: Program | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.units = {stage: layout.units(stage) for stage in layout.stages}
        blocks = {s: frozenset(unit.name for unit in units) for s, units in self.units.items()}
        alike = replace(layout.setting, tp_rank=0)
        self.positions = {s: position_bytes(alike, kinds) for s, kinds in blocks.items()}
        self.sharded = Whole(layout, self) if layout.whole else Sharded(layout, self)
        self.left = dict.fromkeys(layout.stages, layout.num_microbatches)  # remaining backwards
        self._states()
        self._run(lower(layout.schedule)[layout.pp_rank] if program is None else program)

    # --- memory before the first step ---

    def _states(self) -> None:
        layout = self.layout
        for units in self.units.values():
            for unit in units:
                for weights in gathered(unit):
                    shards, _, rank = layout.sharding[weights.over]
                    self.add(WEIGHTS, weights.padded(shards) // shards * layout.master)
                    local = weights.local(shards, rank, lambda weight: True)
                    self.add(MOMENTS, layout.states_per_weight * local * layout.master)
        self.add(TEMPORARY, batch_bytes(layout))

    # --- the program ---

    def _run(self, program: Program) -> None:
        layout, part = self.layout, self.layout.hidden_bytes
        sent = waiting = 0  # messages being sent, and messages computed but not yet posted
        where = layout.where
        self.sharded.begin()
        for item in program:
            if isinstance(item, Exchange):
                self.action = None
                sends = sum(transfer.sends for transfer in item.transfers)
                self.add(MESSAGES, part * (len(item.transfers) - sends))
                self.free(MESSAGES, part * sent)
                sent, waiting = sends, waiting - sends
                continue
            self.action = item
            need, result = need_of(item, layout.num_stages), result_of(item, layout.num_stages)
            if need is not None:  # a hidden state is kept for backward; a gradient is consumed
                self.free(MESSAGES, part)
                self.add(HIDDEN if item.kind is FORWARD else TEMPORARY, part)
            self.left[item.stage] -= item.kind in (BACKWARD, BACKWARD_WEIGHT)
            self.repeat(partial(self._state, item), partial(self._act, item))
            if result is not None:
                self.add(MESSAGES, part)
                waiting += where[result.stage] != layout.pp_rank
        self.action = None

    def _state(self, action: Action) -> Hashable:
        """All that an action's memory depends on, apart from the layout."""
        kind, stage = action.kind, action.stage
        return kind, stage, self.left[stage] == 0, self.sharded.state(stage)

    def _act(self, action: Action) -> None:
        last = self.left[action.stage] == 0
        if action.kind is FORWARD:
            self._forward(action.stage)
            return
        if action.kind in (BACKWARD, BACKWARD_INPUT):
            self._backward(action.stage, action.kind, last)
        else:
            self._weight_gradients(action.stage, last)
        if last and action.kind is not BACKWARD_INPUT:
            self.sharded.end_last_backward(action.stage)

    # --- forward ---

    def _forward(self, stage: int) -> None:
        layout, units = self.layout, self.units[stage]
        self.add(POSITIONS, self.positions[stage])
        buffer, sharded = 0, self.sharded
        for index in range(len(units)):
            buffer = sharded.gather(stage, index, True, buffer)
            first, *inside = self._phase(FORWARD, stage, index).effects
            self._apply(first, buffer)
            if inside:
                buffer = sharded.gather(stage, index, True, buffer, EXPERTS)
                self._apply(inside[0], buffer)
                sharded.after_forward(stage, index, EXPERTS)
                self._apply(inside[1], buffer)
            sharded.after_forward(stage, index)
        if stage < layout.num_stages - 1:  # the last block's output goes to the next stage
            self.free(HIDDEN, units[-1].hidden_bytes)

    # --- backward ---

    def _backward(self, stage: int, kind: Kind, last: bool) -> None:
        layout, sharded = self.layout, self.sharded
        for index in reversed(range(len(self.units[stage]))):
            sharded.gather(stage, index, False, 0)
            first, *inside = self._phase(kind, stage, index).effects
            prefetched = sharded.prefetched(stage, index)
            self._apply(first, prefetched)
            if inside:
                sharded.gather(stage, index, False, 0, EXPERTS)
                self.apply(inside[0])  # what is recomputed of them
                prefetched = sharded.prefetched(stage, index, EXPERTS)
                self._apply(inside[1], prefetched)
                self.add(GATHERING, prefetched)
                self._after(kind, stage, index, last, EXPERTS)
                self.free(GATHERING, prefetched)
                self._apply(inside[2], prefetched)
            self.add(GATHERING, prefetched)
            self._after(kind, stage, index, last)
            self.free(GATHERING, prefetched)
        self.free(POSITIONS, self.positions[stage])
        if stage > 0:  # its input, and the outgoing gradient
            self.free(HIDDEN, layout.hidden_bytes)
            self.free(TEMPORARY, layout.hidden_bytes)
        if stage < layout.num_stages - 1:  # the incoming gradient
            self.free(TEMPORARY, layout.hidden_bytes)

    def _after(self, kind: Kind, stage: int, index: int, last: bool, over: str = OUTER) -> None:
        if kind is BACKWARD:
            self.sharded.after_backward(stage, index, last, over)
        else:
            self.sharded.after_input_gradient(stage, index, over)

    def _apply(self, effect: Effect, buffer: int) -> None:
        """Apply the effect beside a buffer of gathers."""
        self.add(GATHERING, buffer)
        self.apply(effect)
        self.free(GATHERING, buffer)

    def _weight_gradients(self, stage: int, last: bool) -> None:
        units = range(len(self.units[stage]))
        for index in reversed(units):
            self.apply(self._phase(BACKWARD_WEIGHT, stage, index).effect)
        for index in units:
            self.sharded.after_backward(stage, index, last)
            if self.sharded.has_experts(stage, index):
                self.sharded.after_backward(stage, index, last, EXPERTS)

    def _phase(self, kind: Kind, stage: int, index: int) -> Phase:
        units = self.units[stage]
        first = stage > 0 and index == 0
        last = stage < self.layout.num_stages - 1 and index == len(units) - 1
        return self.layout.phase(kind, units[index], first, last, self.sharded.begun(stage, index))


def batch_bytes(layout: Layout) -> int:
    """Bytes of a step's tokens and targets (int64; twice if a micro-batch has several sequences,
    for the transposed copy) and positions, of which every micro-batch cuts its own with cp. (The
    last cp rank has views of whole sequences' positions instead.)"""
    numbers, train = layout.tokens * layout.num_microbatches, layout.config.train
    both = numbers * 16 * (2 if train.micro_batch_size > 1 else 1)
    if layout.config.data.document_mask:
        return both + 8 * numbers
    return both + 8 * (train.seq_len if layout.sizes.cp == 1 else numbers // train.micro_batch_size)


GROWING = ("gpipe", "breadth_first")  # keep every micro-batch until all forwards are done
COUNTED = 4  # micro-batches per pipeline rank of the step in which memory is counted
CHECKED = 2  # of the step in which a schedule is checked: the fewest that all schedules accept


# --- every rank's peak ---


def shortened(layout: Layout, times: int) -> Layout:
    """The same job with at most `times` · pp micro-batches. Every schedule that accepts more also
    accepts that number."""
    config, m = layout.config, layout.num_microbatches
    fewer = times * config.parallel.pp
    if m <= fewer:
        return layout
    train = replace(config.train, global_batch_size=config.train.global_batch_size // m * fewer)
    return replace(layout, config=replace(config, train=train))


def peaks(layout: Layout, first: Sequence[int] = ()) -> Iterator[int]:
    """Yield the peak bytes of each pipeline rank, starting with the ranks in `first`, counted in a
    step with few micro-batches.

    A schedule such as 1F1B fills the pipeline, then repeats itself, then drains it. The number of
    repetitions changes neither what is alive at once nor the order of actions. With 4 · pp
    micro-batches every rank's peak is, to the byte, that of a step with any larger number, except
    for the batch itself (tests/plan/test_plan_search.py; 3 · pp would suffice). GPipe and
    breadth-first do not repeat: they keep all micro-batches, and are counted in full.
    """
    p = layout.config.parallel
    short = layout if p.schedule in GROWING else shortened(layout, COUNTED)
    programs = _programs(p.schedule, p.pp, p.stages_per_rank, short.num_microbatches)
    rest = batch_bytes(layout) - batch_bytes(short)
    for rank in dict.fromkeys([*first, *range(p.pp)]):
        yield Memory(short.at(rank), programs[rank]).peak + rest


@lru_cache(maxsize=16)
def _programs(schedule: str, pp: int, v: int, m: int) -> list[Program]:
    return lower(schedule_of(schedule, pp, v, m))
