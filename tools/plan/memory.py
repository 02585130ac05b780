"""Counts the bytes on one rank through a whole step.

It follows the rank's program in the order of parallel/pipeline/runner.py, and each action unit by
unit. What a unit's forward or backward keeps and frees, and its peak, are recorded from its code
(costs/units.py). To these it adds what FSDP2 allocates (sharded.py; whole.py: without it), the
messages of the pipeline, and the permanent states.
"""

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

from costs.recorder import Effect, Phase
from costs.units import HIDDEN, POSITIONS, TEMPORARY, position_bytes
from parallel.memory import GATHERING, MESSAGES, MOMENTS, WEIGHTS
from parallel.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Kind,
)
from parallel.pipeline.lower import Exchange, Program, lower, need_of, result_of
from tools.plan.account import Account
from tools.plan.layout import Layout, gathered
from tools.plan.sharded import EXPERTS, OUTER, Sharded
from tools.plan.whole import Whole


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
