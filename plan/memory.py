"""Bytes on one rank of a GPU, action by action: what is held, by category, and the moment at which
it is most.

What a block of a stage keeps of a micro-batch between forward and backward, in numbers (T tokens, t
= T / tp with sequence parallelism and T without; D, F, H, K and E as in model/config.py, K counting
a tp rank's own or shared heads):

    none        4 t·D + (2 D + 3 F) T / tp + 2 K·E·T   norms, sum, output; q, attention, gate, up,
                                                       gated; k, v
    selective   1 t·D + (2 D + 2 F) T / tp + 2 K·E·T   output; q, attention, gate, up; k, v; with
                                                       tp 1 also 2 T·D: the products after attention
                                                       and in the end
    full        1 t·D                                  the output, which is the next block's input

besides one float32 per row and norm, or per row and head. D T / tp is H·E T / tp where
model.attention_dim says so, and `none` keeps q and k twice with model.qk_norm: before their norms
too. Everything else is in the program's order: `Memory` goes through it as
parallel/pipeline/runner.py and FSDP2 (plan/sharded.py) do, and notes what is allocated and freed.
Inside an action it knows a few moments of each unit, at which most is alive: those of the products
whose operands are gathered over tp.
"""

from collections.abc import Hashable
from functools import partial

from parallel.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Kind,
)
from parallel.pipeline.lower import Exchange, Program, lower, need_of, result_of
from parallel.placement import chunk_range
from plan.account import Account
from plan.categories import (
    ATTENDED,
    DEFERRED,
    GATED,
    GATHERING,
    GRADIENTS,
    HEAD,
    MESSAGES,
    MOMENTS,
    NORMED,
    POSITIONS,
    PROJECTED,
    STREAM,
    TEMPORARY,
    WEIGHTS,
)
from plan.layout import Layout, Sizes, Unit
from plan.sharded import Sharded


class Memory(Account):
    """`peak` bytes, `at_peak` by category, `activations` by kind, and the `peak_action`."""

    def __init__(self, layout: Layout, program: Program | None = None) -> None:
        super().__init__()
        self.layout, self.sizes = layout, Sizes(layout)
        self.units = {stage: layout.units(stage) for stage in layout.stages}
        self.sharded = Sharded(layout, self)
        self.left = dict.fromkeys(layout.stages, layout.num_microbatches)  # backwards to come
        self._states()
        self._run(lower(layout.schedule)[layout.pp_rank] if program is None else program)

    # --- what is there before the first step ---

    def _states(self) -> None:
        layout = self.layout
        for units in self.units.values():
            for unit in units:
                self.add(WEIGHTS, unit.padded(layout.dp_shard) // layout.dp_shard * layout.master)
                for rows, columns in unit.shapes:
                    local = len(chunk_range(rows, layout.dp_shard, layout.dp_shard_rank)) * columns
                    self.add(MOMENTS, layout.states_per_weight * local * layout.master)
        self.add(TEMPORARY, batch_bytes(layout))

    # --- the program ---

    def _run(self, program: Program) -> None:
        layout, part = self.layout, self.sizes.part
        sent = waiting = 0  # messages on their way, and made but not yet posted
        where = layout.where
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
            if need is not None:  # a hidden state is kept for backward; a gradient is used up
                self.free(MESSAGES, part)
                self.add(STREAM if item.kind is FORWARD else TEMPORARY, part)
            self.left[item.stage] -= item.kind in (BACKWARD, BACKWARD_WEIGHT)
            self.repeat(partial(self._state, item), partial(self._act, item))
            if result is not None:
                self.add(MESSAGES, part)
                waiting += where[result.stage] != layout.pp_rank
        self.action = None

    def _state(self, action: Action) -> Hashable:
        """All that an action's memory depends on, besides the layout."""
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
        layout, sizes = self.layout, self.sizes
        resharded = layout.config.parallel.zero_stage == 3
        self.add(POSITIONS, sizes.angles)
        buffer = 0
        for index, unit in enumerate(self.units[stage]):
            buffer = self.sharded.gather(stage, index, True, buffer)
            if unit.name == "embedding":
                # where each token stands in the weight, int64, and whether it does
                self.add(POSITIONS, layout.tokens * 9)
                self.reach(temporary=2 * sizes.whole + sizes.scatter, gathering=buffer)
                self.add(STREAM, sizes.part)
            elif unit.name == "block":
                # at the last product, before its sum over tp
                most = sizes.kept_none + sizes.whole + sizes.scatter
                self.reach(temporary=max(most, sizes.kept + sizes.whole), gathering=buffer)
                for kind, size in sizes.kinds.items():
                    self.add(kind, size)
                self.add(STREAM, sizes.part)
            else:
                self._head(buffer)
            if resharded and index + 1 == self.sharded.unit_of[stage, index][1].stop:
                self.sharded.reshard(stage, index)
        if stage < layout.num_stages - 1:  # the last block's output is the next stage's
            self.free(STREAM, sizes.part)

    def _head(self, buffer: int) -> None:
        """Forms its gradients in forward, in pieces (model/kernels/linear_cross_entropy.py)."""
        layout, sizes = self.layout, self.sizes
        weight = layout.vocabulary * layout.model.dim
        wide, narrow = weight * layout.exact, weight * layout.compute
        pieces = layout.head_pieces
        row = layout.model.dim * layout.compute
        normed = sizes.part
        made = 0  # of dx
        for i, tokens in enumerate(pieces):
            following = pieces[i + 1] if i + 1 < len(pieces) else 0
            gathered = (tokens + following) * row if sizes.cut else 0
            logits = tokens * layout.vocabulary * layout.compute
            scattered = tokens * row * sizes.part // sizes.whole if sizes.cut else 0
            before = wide if i else 0
            self.reach(
                temporary=normed + gathered + logits + before + made + tokens * row,
                gathering=buffer,
            )
            self.reach(
                temporary=normed + gathered + logits + wide + made + tokens * row + scattered,
                gathering=buffer,
            )
            made += scattered or tokens * row
        final = pieces[-1] * row * (2 if sizes.cut else 1)
        self.reach(
            temporary=normed + final + wide + 2 * sizes.part + (narrow if narrow != wide else 0),
            gathering=buffer,
        )
        self.add(HEAD, sizes.norm + sizes.part + narrow)

    # --- backward ---

    def _backward(self, stage: int, kind: Kind, last: bool) -> None:
        layout, sizes, units = self.layout, self.sizes, self.units[stage]
        for index in reversed(range(len(units))):
            unit = units[index]
            self.sharded.gather(stage, index, False, 0)
            prefetched = self.sharded.prefetched(stage, index)
            self.add(GATHERING, prefetched)
            fresh = 0 if kind is BACKWARD_INPUT else unit.numel * layout.compute
            if unit.name == "head":
                # dx and dw are there since forward; dx becomes the gradient of the sum that the
                # norm reads.
                narrow = layout.vocabulary * layout.model.dim * layout.compute
                self.reach(temporary=sizes.part)
                self.free(HEAD, sizes.norm + sizes.part + narrow)
                self.free(STREAM, sizes.part)  # the norm's input
                self.add(TEMPORARY, sizes.part)
                deferred = kind is BACKWARD_INPUT
                self.add(DEFERRED if deferred else GRADIENTS, narrow if deferred else fresh)
            elif unit.name == "block":
                self._block_backward(kind is BACKWARD_INPUT)
                if index or not stage:  # its input; one from another stage is held until the end
                    self.free(STREAM, sizes.part)
                self.add(GRADIENTS, fresh)
            else:
                self.reach(
                    temporary=2 * sizes.gather + (sizes.whole if not sizes.cut else 0) + fresh
                )
                self.free(POSITIONS, layout.tokens * 9)
                if kind is BACKWARD_INPUT:
                    self.add(DEFERRED, sizes.whole + layout.tokens * 8)
                self.add(GRADIENTS, fresh)
            if kind is BACKWARD:
                self.sharded.after_backward(stage, index, last)
            elif (
                layout.config.parallel.zero_stage == 3
                and index == self.sharded.unit_of[stage, index][1].start
            ):
                self.sharded.reshard(stage, index)
            self.free(GATHERING, prefetched)
        self.free(POSITIONS, sizes.angles)
        if stage > 0 and units[0].name == "block":
            self.free(STREAM, sizes.part)
        self.free(TEMPORARY, sizes.part)  # the gradient that goes out, or ends

    def _block_backward(self, later: bool) -> None:
        """Moments of a block's backward, with the gradient of its output counted already. `later`:
        weight gradients are formed in another action, and the products' inputs and the gradients of
        their outputs stay until then."""
        layout, s, model = self.layout, self.sizes, self.layout.model
        e = 0 if later else layout.compute
        dw = (model.ffn_dim // layout.tp) * model.dim * e
        dq = layout.q_width * model.dim * e
        dk = layout.kv_rows * model.dim * e
        again = 0 if later else s.gather  # an input that is gathered again, for the weight gradient
        row_parallel = s.part if s.cut else s.whole  # the gradient of such a product's output
        self._recompute()
        self.reach(temporary=s.gather + s.inner, gradients=dw)  # down
        self.add(DEFERRED, row_parallel if later else 0)
        # silu(gate) · up; down's input is still there, or gone
        self.reach(temporary=2 * s.inner, gradients=dw)
        self.free(GATED, 2 * s.inner)
        self._used(GATED, s.inner, later)
        self.add(DEFERRED if later else TEMPORARY, 2 * s.inner)
        self.reach(temporary=again + s.whole + s.scatter, gradients=3 * dw)  # gate, up
        self.free(TEMPORARY, 0 if later else 2 * s.inner)
        self.free(STREAM, s.part)
        self.free(NORMED, s.norm)
        self._used(NORMED, s.part, later)
        self.reach(temporary=s.gather + s.query, gradients=3 * dw + dq)  # output
        self.add(DEFERRED, row_parallel if later else 0)
        self.reach(temporary=2 * s.query + 2 * s.key, gradients=3 * dw + dq)  # attention
        self.free(PROJECTED, s.query + 2 * s.key + s.unnormed)
        self.free(ATTENDED, s.rows)
        self._used(ATTENDED, s.query, later)
        self.add(DEFERRED if later else TEMPORARY, s.query + 2 * s.key)
        # query, key, value
        self.reach(temporary=again + s.whole + s.scatter, gradients=3 * dw + 2 * dq + 2 * dk)
        self.free(TEMPORARY, 0 if later else s.query + 2 * s.key)
        self.free(NORMED, s.norm)
        self._used(NORMED, s.part, later)

    def _recompute(self) -> None:
        """A block's activations are all there again, as if nothing had been dropped."""
        s = self.sizes
        if s.kinds == s.kinds_none:
            return
        for kind, size in s.kinds.items():
            self.free(kind, size)
        for kind, size in s.kinds_none.items():
            self.add(kind, size)
        # the last product of the forward that is repeated
        self.reach(temporary=s.whole + s.scatter)

    def _used(self, kind: str, size: int, later: bool) -> None:
        """A product's input: free, unless its weight gradient comes later."""
        if not later:
            self.free(kind, size)

    def _weight_gradients(self, stage: int, last: bool) -> None:
        layout, units = self.layout, self.units[stage]
        for index in reversed(range(len(units))):
            self._unit_weight_gradients(units[index])
            self.add(GRADIENTS, units[index].numel * layout.compute)
        for index in range(len(units)):
            self.sharded.after_backward(stage, index, last)

    def _unit_weight_gradients(self, unit: Unit) -> None:
        layout, s = self.layout, self.sizes
        if unit.name == "head":
            self.free(DEFERRED, layout.vocabulary * layout.model.dim * layout.compute)
        elif unit.name == "block":
            self.reach(temporary=2 * s.gather)
            self.free(
                DEFERRED, s.query + 2 * s.key + 2 * s.inner + 2 * (s.part if s.cut else s.whole)
            )
            self.free(NORMED, 2 * s.part)
            self.free(ATTENDED, s.query)
            self.free(GATED, s.inner)
        else:
            self.reach(gradients=unit.numel * layout.compute)
            self.free(DEFERRED, s.whole + layout.tokens * 8)


def batch_bytes(layout: Layout) -> int:
    """Tokens and targets of a step, int64, transposed where micro-batches are not rows; and
    positions."""
    numbers = layout.tokens * layout.num_microbatches
    both = numbers * 16 * (2 if layout.config.train.micro_batch_size > 1 else 1)
    return both + 8 * (numbers if layout.config.data.document_mask else layout.config.train.seq_len)


def block_backward(layout: Layout, later: bool) -> tuple[int, int]:
    """Bytes by which a block's backward rises above what is there when it begins, and by which it
    ends above that, or below."""
    memory = Memory(layout, [])
    before = memory.peak = memory.total
    memory._block_backward(later)
    return memory.peak - before, memory.total - before
