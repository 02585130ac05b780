"""Counts the bytes on one rank through a whole step, and their peak on every pipeline rank.

    Sharded    what FSDP2 allocates around units: gathers, copies, reductions (parallel/data.py)
    Whole      what is allocated instead where no rank shares the weights (parallel/whole.py)
    Memory     a rank's program, in the order of parallel/pipeline/runner.py, unit by unit
    peaks      the peak of every pipeline rank, in a step with few micro-batches
    one_stage  the data stage of a run that is planned: by default that with the highest peak

What a unit's forward or backward keeps and frees, and its peak, are recorded from its code
(costs/units.py). To these the others add the weights and their gradients, the messages of the
pipeline, and the permanent states.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from costs.recorder import Phase
from costs.units import HEAD, position_bytes
from errors import UserError
from parallel.fsdp_units import input_buffers
from parallel.memory import (
    ACTIVATIONS,
    GATHERED,
    GATHERING,
    GRADIENTS,
    MESSAGES,
    MOMENTS,
    REDUCING,
    SHARDED_GRADIENTS,
    TEMPORARY,
    WEIGHTS,
)
from parallel.pipeline.actions import Kind, need_of, result_of
from parallel.pipeline.lower import Exchange
from parallel.weight_gradient import adds_to_gradients
from settings.config import Config
from settings.data_stages import data_stages
from tools.plan.account import Account
from tools.plan.layout import Gathered, Layout
from tools.plan.whole_matrices import count_update
from training.update import group_bytes

# --- around the units ---


@dataclass(eq=False)
class FsdpUnit:
    """The state of a unit of FSDP: one unit of a stage, or with `fsdp_unit: stage` all its units.
    Experts in it are another one, `inside`, which is gathered after and reduced before the rest."""

    stage: int
    indices: list[int]  # of its units in the stage
    weights: Gathered
    size: int  # bytes when gathered
    inside: "FsdpUnit | None" = None
    gathered: bool = False
    accumulated: bool = False  # holds whole gradients
    reduced: bool = False  # holds reduced gradients of some micro-batches
    held: int = 0  # bytes of its last reduction that FSDP holds until the next


class Sharded:
    """What FSDP holds on a rank: which units are gathered, and where their gradients are."""

    def __init__(self, layout: Layout, account: Account) -> None:
        self.layout, self.account = layout, account
        self.resharding = layout.config.parallel.zero_stage == 3
        # for each unit of a stage, the FSDP units that contain it: that of experts, if any, first
        self.around: dict[tuple[int, int], list[FsdpUnit]] = defaultdict(list)
        for stage in layout.stages:
            experts = None
            for indices, weights in layout.fsdp_units(stage):
                size = weights.padded * layout.compute
                unit = FsdpUnit(stage, indices, weights, size, experts)
                experts = unit if weights.is_expert else None
                for index in indices:
                    self.around[stage, index].append(unit)
        # by stage: bytes of buffers that FSDP still holds
        self.inputs_of_reductions: dict[int, list[int]] = defaultdict(list)
        self.outputs_of_reductions: dict[int, int] = defaultdict(int)
        self.reducing: list[int] = []  # stages whose reductions were not waited for yet

    def begun(self, stage: int, index: int) -> bool:
        """Whether a unit's sums have gradients of an earlier micro-batch."""
        return self.around[stage, index][-1].accumulated

    def gather(self, unit: FsdpUnit, forward: bool, before: int) -> int:
        """Gather the weights before a forward or backward.

        `before`: bytes of the previous gather's buffer, which FSDP holds until this one's has been
        copied out. Returns the bytes of this gather's buffer.
        """
        if unit.gathered:
            return before
        layout, size, shards = self.layout, unit.size, unit.weights.shards
        buffer = size if shards > 1 else 0
        flat = buffer // shards if layout.compute != layout.master else 0
        if layout.offloads:  # the shards are copied from the host, one after another
            flat, copied = size // shards, 0
            for numel in unit.weights.padded_each:
                copied += numel // shards * layout.compute
                whole = numel // shards * layout.master if layout.compute != layout.master else 0
                self.account.reach({GATHERING: before + copied + whole})
        if forward:
            self.account.reach({GATHERING: before + buffer + flat})
        self.account.add(GATHERED, size)
        # experts that are cut are put together from a second copy
        again = unit.weights.cut_within * layout.compute
        self.account.reach({GATHERING: before + buffer + again})
        unit.gathered = True
        return buffer

    def prefetched(self, stage: int, index: int, inside: bool = False) -> int:
        """Bytes gathered during a unit's backward, or `inside` during that of its experts, for the
        FSDP unit whose backward comes next: the experts in it, or the unit before."""
        outer = self.around[stage, index][-1]
        start, following = outer.indices[0], outer.inside
        if inside or following is None or index < following.indices[0]:
            following = self.around[stage, start - 1][-1] if start else None
        if not self.resharding or following is None or following.gathered:
            return 0
        return following.size if following.weights.shards > 1 else 0

    def after_unit(self, unit: FsdpUnit, index: int, end: int) -> None:
        """After a unit's forward or input gradient. `end`: which of the FSDP unit's is the last."""
        if self.resharding and index == unit.indices[end]:
            self._reshard(unit)

    def _reshard(self, unit: FsdpUnit) -> None:
        if unit.gathered:
            unit.gathered = False
            self.account.free(GATHERED, unit.size)

    def after_backward(self, unit: FsdpUnit, index: int, last: bool) -> None:
        """After the backward of the last unit within an FSDP unit, reduce its gradients, or keep
        them until the last backward."""
        if index != unit.indices[0]:
            return
        zero = self.layout.config.parallel.zero_stage
        if zero == 3 or last:
            self._reshard(unit)
        if last or zero >= 2:
            self._free_inputs(unit.stage)
            self._reduce(unit, last)
        else:
            unit.accumulated = True

    def after_input_gradients(self, unit: FsdpUnit, index: int) -> None:
        """After the input gradients of the last unit within an FSDP unit. With zero_stage 2 and 3
        FSDP makes room for a reduction, although there is nothing to reduce yet."""
        self.after_unit(unit, index, 0)
        if index == unit.indices[0] and self.layout.config.parallel.zero_stage >= 2:
            self._free_inputs(unit.stage)

    def _free_inputs(self, stage: int) -> None:
        """Before a stage's next reduction, free the inputs of all that FSDP does not keep."""
        inputs = self.inputs_of_reductions[stage]
        while len(inputs) >= input_buffers(self.layout.config.parallel.zero_stage):
            self.account.free(REDUCING, inputs.pop(0))

    def _reduce(self, unit: FsdpUnit, last: bool) -> None:
        """Reduce over the shards. The last reduction of a step also reduces over the replicas and
        converts to the weights' dtype; until then FSDP sums in reduce_dtype, unless each reduction
        does both (`adds_to_gradients`)."""
        layout, account, stage = self.layout, self.account, unit.stage
        dtypes = layout.config.precision
        adds = adds_to_gradients(unit.weights.replicas, dtypes.reduce, dtypes.master)
        account.free(REDUCING, unit.held)
        unit.accumulated, unit.held = False, 0
        shards, given = unit.weights.shards, unit.weights.padded * layout.reduce
        # a variable of a loop in FSDP holds the last weight's until the end of the reduction; if
        # experts are cut, also beside copies of all
        remains = unit.weights.weights[-1].numel * layout.sum if shards > 1 else 0
        account.reach({REDUCING: given + (remains if unit.weights.cut_within else 0)})
        account.add(REDUCING, given)
        self.inputs_of_reductions[stage].append(given)
        account.free(GRADIENTS, unit.weights.numel * layout.sum - remains)
        output = given // shards
        # With one shard (replicas only), FSDP divides the gradients by 1, into a copy.
        account.reach({REDUCING: output + (given if shards == 1 else 0)})
        if not (last or adds):
            if not unit.reduced:
                account.add(SHARDED_GRADIENTS, output)
                unit.reduced = True
            account.free(GRADIENTS, remains)
            return
        # the output of the reduction over replicas is held until the stage's backward ends
        converted = output // layout.reduce * layout.master if layout.master != layout.reduce else 0
        if converted or layout.offloads:
            account.add(REDUCING, output)
            if last:
                self.outputs_of_reductions[stage] += output
            else:
                unit.held = output
        if layout.offloads or (adds and unit.reduced):
            account.reach({REDUCING: converted})
        else:
            account.add(SHARDED_GRADIENTS, converted or output)
        account.free(GRADIENTS, remains)
        if unit.reduced and not adds:
            account.free(SHARDED_GRADIENTS, output)
        unit.reduced = adds and not last

    def end_last_backward(self, stage: int) -> None:
        """The reductions of the stage before it were waited for."""
        self.wait()
        self.reducing = [stage]

    def wait(self) -> None:
        for done in self.reducing:
            held = sum(self.inputs_of_reductions.pop(done, []))
            self.account.free(REDUCING, held + self.outputs_of_reductions.pop(done, 0))


class Whole(Sharded):
    """The same on a rank whose weights no other rank shares, where FSDP is not used: nothing is
    gathered or reduced. Copies of the weights live from the first action of a step to a stage's
    last backward."""

    def __init__(self, layout: Layout, account: Account) -> None:
        super().__init__(layout, account)
        self.resharding = False
        # Weights are copied unless all dtypes are equal, but the copies share the masters' memory
        # if those have the compute dtype.
        self.copies = layout.compute != layout.master
        for unit in itertools.chain(*self.around.values()):  # each contains one unit
            unit.gathered = True
            if self.copies:
                account.add(GATHERED, unit.size)

    def after_backward(self, unit: FsdpUnit, index: int, last: bool) -> None:
        """After a unit's backward: its sums, if they are new and in the master dtype, are the
        gradients that the optimizer reads."""
        if not unit.accumulated:
            unit.accumulated = True
            if self.layout.sum == self.layout.master:
                self._hand_over(unit)

    def _hand_over(self, unit: FsdpUnit) -> None:
        self.account.free(GRADIENTS, unit.weights.numel * self.layout.sum)
        self.account.add(SHARDED_GRADIENTS, unit.weights.numel * self.layout.master)

    def end_last_backward(self, stage: int) -> None:
        """Free a stage's copies, and convert its sums weight by weight."""
        for index in range(len(self.layout.units(stage))):
            units = self.around[stage, index]
            if self.copies:
                self.account.free(GATHERED, sum(unit.size for unit in units))
            if self.layout.sum != self.layout.master:
                widest = max(w.numel for unit in units for w in unit.weights.weights)
                self.account.reach({GRADIENTS: widest * self.layout.master})
                for unit in units:
                    self._hand_over(unit)


# --- between steps ---


def state_bytes(layout: Layout) -> tuple[int, list[int]]:
    """Bytes of a rank's sharded weights, and of its optimizer states of each weight."""
    units = [unit for stage in layout.stages for _, unit in layout.fsdp_units(stage)]
    weights = sum(unit.padded // unit.shards * layout.master for unit in units)
    return weights, [layout.bytes_of_states(*part) for unit in units for part in unit.parts()]


def bytes_outside(layout: Layout) -> tuple[int, int]:
    """Bytes that a rank keeps in the host's memory, and on a local disk: weights, states, and a
    copy of both to save from; on the host also their gradients."""
    weights, states = state_bytes(layout)
    copies = weights + sum(states)
    where = layout.config.parallel.offload
    if where == "disk":  # with the states of three groups
        group = max(group_bytes(sum(states)), *states)
        return weights + min(3 * round(group), sum(states)), 2 * copies
    return copies + (copies + weights if where == "host" else 0), 0


# --- a rank's program ---


class Memory(Account):
    """The memory of one rank: `peak` bytes, `at_peak` by category, and the `peak_action`."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.units = {stage: layout.units(stage) for stage in layout.stages}
        blocks = {s: frozenset(unit.name for unit in units) for s, units in self.units.items()}
        alike = replace(layout.setting, tp_rank=0)
        self.positions = {s: position_bytes(alike, kinds) for s, kinds in blocks.items()}
        self.sharded = Whole(layout, self) if layout.whole else Sharded(layout, self)
        self.left = dict.fromkeys(layout.stages, layout.num_microbatches)  # remaining backwards
        self.has_loss = False  # the head was computed: its sum begins in forward
        # before the first step
        if not layout.offloads:
            weights, states = state_bytes(layout)
            self.add(WEIGHTS, weights)
            self.add(MOMENTS, sum(states))
        self.add(TEMPORARY, batch_bytes(layout))
        self._run()

    # --- the program ---

    def _run(self) -> None:
        layout, part = self.layout, self.layout.hidden_bytes
        sent = 0  # messages that are being sent
        for item in layout.program:
            if isinstance(item, Exchange):
                self.action = None
                sends = sum(transfer.sends for transfer in item.transfers)
                self.add(MESSAGES, part * (len(item.transfers) - sends))
                self.free(MESSAGES, part * sent)
                sent = sends
                continue
            self.action = item
            if need_of(item, layout.num_stages) is not None:
                # a hidden state is kept for backward; a gradient is consumed
                self.free(MESSAGES, part)
                self.add(ACTIVATIONS if item.kind is Kind.FORWARD else TEMPORARY, part)
            self.left[item.stage] -= item.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            work = self._forward if item.kind is Kind.FORWARD else self._backward
            work(item.stage, item.kind, self.left[item.stage] == 0)
            if result_of(item, layout.num_stages) is not None:
                self.add(MESSAGES, part)
        self.action = None
        self.free(MESSAGES, part * sent)
        self.sharded.wait()
        count_update(self, layout)

    # --- forward ---

    def _forward(self, stage: int, kind: Kind, last: bool) -> None:
        layout, units, sharded = self.layout, self.units[stage], self.sharded
        self.add(ACTIVATIONS, self.positions[stage])
        buffer = 0
        for index in range(len(units)):
            *experts, outer = sharded.around[stage, index]
            buffer = sharded.gather(outer, True, buffer)
            first, *inside = self._phase(kind, stage, index).effects
            self.has_loss |= units[index].name == HEAD
            self.apply(first, buffer)
            if inside:
                buffer = sharded.gather(experts[0], True, buffer)
                self.apply(inside[0], buffer)
                sharded.after_unit(experts[0], index, -1)
                self.apply(inside[1], buffer)
            sharded.after_unit(outer, index, -1)
        if stage < layout.num_stages - 1:  # the last block's output goes to the next stage
            self.free(ACTIVATIONS, units[-1].hidden_bytes)

    # --- backward ---

    def _backward(self, stage: int, kind: Kind, last: bool) -> None:
        units = range(len(self.units[stage]))
        if kind is not Kind.BACKWARD_WEIGHT:
            self._input_gradients(stage, kind, last)
        else:
            for index in reversed(units):
                self.apply(self._phase(kind, stage, index).effect)
            for index in units:
                for unit in reversed(self.sharded.around[stage, index]):
                    self.sharded.after_backward(unit, index, last)
        if last and kind is not Kind.BACKWARD_INPUT:
            self.sharded.end_last_backward(stage)

    def _input_gradients(self, stage: int, kind: Kind, last: bool) -> None:
        """With kind BACKWARD those of weights too."""
        layout, sharded = self.layout, self.sharded
        for index in reversed(range(len(self.units[stage]))):
            *experts, outer = sharded.around[stage, index]
            sharded.gather(outer, False, 0)
            first, *inside = self._phase(kind, stage, index).effects
            prefetched = sharded.prefetched(stage, index)
            self.apply(first, prefetched)
            if inside:
                sharded.gather(experts[0], False, 0)
                self.apply(inside[0])  # what is recomputed of them
                prefetched = sharded.prefetched(stage, index, inside=True)
                self.apply(inside[1], prefetched)
                self._after(kind, experts[0], index, last, prefetched)
                self.apply(inside[2], prefetched)
            self._after(kind, outer, index, last, prefetched)
        self.free(ACTIVATIONS, self.positions[stage])
        if stage > 0:  # its input, and the outgoing gradient
            self.free(ACTIVATIONS, layout.hidden_bytes)
            self.free(TEMPORARY, layout.hidden_bytes)
        if stage < layout.num_stages - 1:  # the incoming gradient
            kept = self._kept_incoming(stage) if kind is Kind.BACKWARD_INPUT else 0
            self.free(TEMPORARY, layout.hidden_bytes - kept)

    def _kept_incoming(self, stage: int) -> int:
        """Bytes of the gradient that another stage has sent, if a weight gradient reads it: then it
        is freed in the phase of weight gradients."""
        if stage == self.layout.num_stages - 1:
            return 0
        unit = self.units[stage][-1]
        phases = (
            self.layout.phase(Kind.BACKWARD_WEIGHT, unit, last=last) for last in (False, True)
        )
        own, sent = (phase.effect.changes for phase in phases)
        return sent.get(TEMPORARY, 0) - own.get(TEMPORARY, 0)

    def _after(self, kind: Kind, unit: FsdpUnit, index: int, last: bool, buffer: int) -> None:
        self.add(GATHERING, buffer)
        if kind is Kind.BACKWARD:
            self.sharded.after_backward(unit, index, last)
        else:
            self.sharded.after_input_gradients(unit, index)
        self.free(GATHERING, buffer)

    def _phase(self, kind: Kind, stage: int, index: int) -> Phase:
        units = self.units[stage]
        first = stage > 0 and index == 0
        last = stage < self.layout.num_stages - 1 and index == len(units) - 1
        if kind is Kind.BACKWARD_WEIGHT:  # whose records free what `_kept_incoming` counts
            last = False
        begun = self.sharded.begun(stage, index)
        if kind is Kind.FORWARD and units[index].name == HEAD:
            begun |= self.has_loss
        return self.layout.phase(kind, units[index], first, last, begun)


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


def peaks(layout: Layout) -> Iterator[int]:
    """Yield the peak bytes of each pipeline rank, counted in a step with few micro-batches.

    A schedule such as 1F1B fills the pipeline, then repeats itself, then drains it. The number of
    repetitions changes neither what is alive at once nor the order of actions. With 4 · pp
    micro-batches every rank's peak is, to the byte, that of a step with any larger number, except
    for the batch itself (tests/plan/test_plan_search.py; 3 · pp would suffice). GPipe and
    breadth-first do not repeat: they keep all micro-batches, and are counted in full.
    """
    p = layout.config.parallel
    short = layout if p.schedule in GROWING else shortened(layout, COUNTED)
    rest = batch_bytes(layout) - batch_bytes(short)
    for rank in range(p.pp):
        yield Memory(short.at(rank)).peak + rest


# --- which job is planned: one data stage of a run (settings/data_stages.py) at a time ---


def one_stage(config: Config, world: int, number: int | None) -> tuple[Config, str]:
    """The configuration of data stage `number`, or of the one that needs the most memory on some
    rank; and a line that says which, empty for a run of only one. Raises UserError."""
    stages = [stage.config for stage in data_stages(config)]
    last = len(stages) - 1
    if number is not None and not 0 <= number <= last:
        why = f"the configuration has the data stages 0 to {last}"
        raise UserError("--data-stage", number, why, "choose one of them")
    if not last:
        return config, ""
    if number is not None:
        return stages[number], f"data stage {number} of 0 to {last}"
    most = [max(peaks(Layout(stage, world, 0))) for stage in stages]
    number = most.index(max(most))
    each = ", ".join(f"{peak / 1e9:.2f}" for peak in most)
    return stages[number], f"data stage {number} of 0 to {last}, whose peaks are {each} GB"
