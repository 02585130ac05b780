"""Bytes on one rank of a GPU, action by action: what is held, by category, and the moment at which it is most.

What a block of a stage keeps of a micro-batch between forward and backward, in numbers (T tokens, t = T / tp with sequence
parallelism and T without; D, F, H, K and E as in model/config.py, K counting a tp rank's own or shared heads):

    none        4 t·D + (2 D + 3 F) T / tp + 2 K·E·T       norms, sum, output; q, attention, gate, up, gated; k, v
    selective   1 t·D + (2 D + 2 F) T / tp + 2 K·E·T       output; q, attention, gate, up; k, v; with tp 1 also 2 T·D: the
                                                           products after attention and in the end
    full        1 t·D                                      the output, which is the next block's input

besides one float32 per row and norm, or per row and head. Everything else is in the program's order: `Memory` goes through
it as parallel/pipeline/runner.py and FSDP2 do, and notes what is allocated and freed. Inside an action it knows a few moments
of each unit, at which most is alive: those of the products whose operands are gathered over tp.
"""

from collections import defaultdict

from parallel.pipeline.actions import Action, B, F, I, Kind
from parallel.pipeline.lower import Exchange, Program, lower, need_of, result_of
from parallel.placement import chunk_range
from plan.layout import Layout, Sizes, Unit

WEIGHTS, MOMENTS = "sharded weights", "optimizer state"
GATHERED, GRADIENTS, SHARDED_GRADIENTS = "gathered weights", "whole gradients", "sharded gradients"
GATHERING, REDUCING = "buffers of gathers", "buffers of reductions"
ACTIVATIONS, DEFERRED = "activations", "kept for weight gradients"
MESSAGES, TEMPORARY = "messages of the pipeline", "temporary"


class Memory:
    """`peak` bytes, `at_peak` by category, and the `peak_action`: None between actions and after the last."""

    def __init__(self, layout: Layout, program: Program | None = None) -> None:
        self.layout, self.sizes = layout, Sizes(layout)
        self.now: dict[str, int] = defaultdict(int)
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.action: Action | None = None
        self.peak_action: Action | None = None
        self.units = {stage: layout.units(stage) for stage in layout.stages}
        self.left = dict.fromkeys(layout.stages, layout.num_microbatches)
        self.gathered: set[tuple[int, int]] = set()  # (stage, unit)
        self.accumulated: set[tuple[int, int]] = set()  # units that hold whole gradients
        self.sharded: set[tuple[int, int]] = set()
        self.reducing: dict[int, int] = defaultdict(int)  # stage → bytes of the reduction's input that FSDP holds on to
        self._states()
        self._run(lower(layout.schedule)[layout.pp_rank] if program is None else program)

    # --- keeping count ---

    def add(self, category: str, size: int) -> None:
        self.now[category] += size
        self.total += size
        self.reach()

    def reach(self, **more: int) -> None:
        """The moment: with `more` bytes alive besides. (Keyword: temporary, whole_gradients or gathering.)"""
        total = self.total + sum(more.values())
        if total > self.peak:
            self.peak, self.peak_action = total, self.action
            self.at_peak = dict(self.now)
            for name, size in more.items():
                category = {"temporary": TEMPORARY, "gradients": GRADIENTS, "gathering": GATHERING, "reducing": REDUCING}[name]
                self.at_peak[category] = self.at_peak.get(category, 0) + size

    # --- what is there before the first step ---

    def _states(self) -> None:
        layout = self.layout
        for units in self.units.values():
            for unit in units:
                self.add(WEIGHTS, unit.padded(layout.dp_shard) // layout.dp_shard * layout.master)
                for rows, columns in unit.shapes:
                    local = len(chunk_range(rows, layout.dp_shard, layout.dp_shard_rank)) * columns
                    self.add(MOMENTS, 2 * local * layout.master)
        numbers = layout.tokens * layout.num_microbatches  # tokens and targets, int64; transposed where they are not rows
        self.add(TEMPORARY, numbers * 16 * (2 if layout.config.train.micro_batch_size > 1 else 1))
        self.add(TEMPORARY, 8 * (numbers if layout.config.data.document_mask else layout.config.train.seq_len))

    # --- the program ---

    def _run(self, program: Program) -> None:
        layout, part = self.layout, self.sizes.part
        sent = waiting = 0  # messages on their way, and made but not yet posted
        where = layout.config.parallel.ranks_of_stages
        for item in program:
            if isinstance(item, Exchange):
                self.action = None
                sends = sum(transfer.sends for transfer in item.transfers)
                self.add(MESSAGES, part * (len(item.transfers) - sends))
                self.add(MESSAGES, -part * sent)
                sent, waiting = sends, waiting - sends
                continue
            self.action = item
            need, result = need_of(item, layout.num_stages), result_of(item, layout.num_stages)
            if need is not None:  # a hidden state is kept for backward; a gradient is used up
                self.add(MESSAGES, -part)
                self.add(ACTIVATIONS if item.kind is F else TEMPORARY, part)
            if item.kind is F:
                self._forward(item.stage)
            else:
                self.left[item.stage] -= item.kind is not I
                if item.kind is B or item.kind is I:
                    self._backward(item.stage, item.kind)
                else:
                    self._weight_gradients(item.stage)
                if item.kind is not I and self.left[item.stage] == 0:
                    self.add(REDUCING, -self.reducing.pop(item.stage, 0))
            if result is not None:
                self.add(MESSAGES, part)
                waiting += where[result.stage] != layout.pp_rank
        self.action = None

    # --- FSDP ---

    def _gather(self, stage: int, index: int, forward: bool, before: int) -> int:
        """Before a unit's forward or backward: its weights, whole. `before`: bytes of the buffer that the unit before it
        gathered into, and in which FSDP holds what it gathered until the next one has its own. Returns this unit's."""
        layout, unit = self.layout, self.units[stage][index]
        if (stage, index) in self.gathered:
            return 0
        size = unit.padded(layout.dp_shard) * layout.compute
        buffer = size if layout.dp_shard > 1 else 0
        flat = size // layout.dp_shard if layout.compute != layout.master and layout.dp_shard > 1 else 0
        if forward:
            self.reach(gathering=before + buffer + flat)
        self.add(GATHERED, size)
        self.reach(gathering=buffer)
        self.gathered.add((stage, index))
        return buffer

    def _reshard(self, stage: int, index: int) -> None:
        if (stage, index) in self.gathered:
            self.gathered.remove((stage, index))
            self.add(GATHERED, -self.units[stage][index].padded(self.layout.dp_shard) * self.layout.compute)

    def _finish_unit(self, stage: int, index: int, fresh: int) -> None:
        """After a unit's backward, with `fresh` bytes of gradients in the compute dtype: sum them, or reduce them."""
        layout, unit, key = self.layout, self.units[stage][index], (stage, index)
        zero, last = layout.config.parallel.zero_stage, self.left[stage] == 0
        reduces = last or zero >= 2
        whole = unit.numel * layout.reduce
        if zero == 3 or last:
            self._reshard(stage, index)
        if not reduces:
            if key not in self.accumulated:
                # One parameter after the other changes its width; the largest comes last, or nearly.
                widest = max(rows * columns for rows, columns in unit.shapes) if layout.reduce != layout.compute else 0
                self.add(GRADIENTS, -fresh)
                self.add(GRADIENTS, whole)
                self.reach(gradients=widest * layout.compute)
                self.accumulated.add(key)
            else:
                self.add(GRADIENTS, -fresh)
            return
        if key in self.accumulated:
            self.add(GRADIENTS, -fresh)
            fresh = whole
            self.accumulated.remove(key)
        self.add(REDUCING, -self.reducing.pop(stage, 0))
        buffer = unit.padded(layout.dp_shard) * layout.reduce
        self.add(REDUCING, buffer)
        self.reducing[stage] = buffer
        self.add(GRADIENTS, -fresh)
        reduced = buffer // layout.dp_shard
        self.reach(reducing=reduced + (buffer if layout.dp_shard == 1 else 0))  # alone, a rank divides by 1 into a copy
        if key not in self.sharded:
            self.add(SHARDED_GRADIENTS, reduced)
            self.sharded.add(key)
        if last and layout.reduce > layout.master:
            self.reach(reducing=reduced // layout.reduce * layout.master)
            self.add(SHARDED_GRADIENTS, -reduced // layout.reduce * (layout.reduce - layout.master))

    # --- forward ---

    def _forward(self, stage: int) -> None:
        layout, sizes = self.layout, self.sizes
        resharded = layout.config.parallel.zero_stage == 3
        self.add(ACTIVATIONS, sizes.angles)
        buffer = 0
        for index, unit in enumerate(self.units[stage]):
            buffer = self._gather(stage, index, True, buffer)
            if unit.name == "embedding":
                rows = layout.tokens * 9  # where each token stands in the weight, int64, and whether it does
                self.add(ACTIVATIONS, rows)
                self.reach(temporary=2 * sizes.whole + sizes.scatter, gathering=buffer)
                self.add(ACTIVATIONS, sizes.part)
            elif unit.name == "block":
                most = sizes.kept_none + sizes.whole + sizes.scatter  # at the last product, before its sum over tp
                self.reach(temporary=max(most, sizes.kept + sizes.whole), gathering=buffer)
                self.add(ACTIVATIONS, sizes.kept + sizes.part)
            else:
                self._head(unit, buffer)
            if resharded:
                self._reshard(stage, index)
        if stage < layout.num_stages - 1:  # the last block's output is the next stage's
            self.add(ACTIVATIONS, -sizes.part)

    def _head(self, unit: Unit, buffer: int) -> None:
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
            self.reach(temporary=normed + gathered + logits + before + made + tokens * row, gathering=buffer)
            self.reach(temporary=normed + gathered + logits + wide + made + tokens * row + scattered, gathering=buffer)
            made += scattered or tokens * row
        final = pieces[-1] * row * (2 if sizes.cut else 1)
        self.reach(temporary=normed + final + wide + 2 * sizes.part + (narrow if narrow != wide else 0), gathering=buffer)
        self.add(ACTIVATIONS, sizes.norm + sizes.part + narrow)

    # --- backward ---

    def _backward(self, stage: int, kind: Kind) -> None:
        layout, sizes = self.layout, self.sizes
        zero = layout.config.parallel.zero_stage
        units = self.units[stage]
        for index in reversed(range(len(units))):
            unit = units[index]
            self._gather(stage, index, False, 0)
            prefetched = 0  # the unit that comes next is being gathered
            if zero == 3 and index and layout.dp_shard > 1:
                prefetched = units[index - 1].padded(layout.dp_shard) * layout.compute
            self.add(GATHERING, prefetched)
            fresh = 0 if kind is I else unit.numel * layout.compute
            if unit.name == "head":
                # dx and dw are there since forward; dx becomes the gradient of the sum that the norm reads.
                narrow = layout.vocabulary * layout.model.dim * layout.compute
                self.reach(temporary=sizes.part)
                self.add(ACTIVATIONS, -sizes.norm - 2 * sizes.part - narrow)  # with the norm's input
                self.add(TEMPORARY, sizes.part)
                self.add(DEFERRED if kind is I else GRADIENTS, narrow if kind is I else fresh)
            elif unit.name == "block":
                self._block_backward(kind)
                if index or not stage:  # its input; one from another stage is held until the end
                    self.add(ACTIVATIONS, -sizes.part)
                if kind is B:
                    self.add(GRADIENTS, fresh)
            else:
                dw = 0 if kind is I else fresh
                self.reach(temporary=2 * sizes.gather + (sizes.whole if not sizes.cut else 0) + dw)
                self.add(ACTIVATIONS, -layout.tokens * 9)
                if kind is I:
                    self.add(DEFERRED, sizes.whole + layout.tokens * 8)
                else:
                    self.add(GRADIENTS, fresh)
            if kind is B:
                self._finish_unit(stage, index, fresh)
            elif zero == 3:
                self._reshard(stage, index)
            self.add(GATHERING, -prefetched)
        has_input = stage > 0 and units[0].name == "block"
        self.add(ACTIVATIONS, -sizes.angles - (sizes.part if has_input else 0))
        self.add(TEMPORARY, -sizes.part)  # the gradient that goes out, or ends

    def _block_backward(self, kind: Kind) -> None:
        """Moments of a block's backward, with the gradient of its output counted already."""
        layout, s, model = self.layout, self.sizes, self.layout.model
        later = kind is I  # weight gradients come later: the products' inputs and output gradients stay
        e = 0 if later else layout.compute
        dw = (model.ffn_dim // layout.tp) * model.dim * e
        dq = (model.dim // layout.tp) * model.dim * e
        dk = layout.kv_rows * model.dim * e
        again = 0 if later else s.gather
        held = DEFERRED if later else TEMPORARY
        self.add(ACTIVATIONS, s.kept_none - s.kept)
        if s.kept != s.kept_none:
            self.reach(temporary=s.whole + s.scatter)  # the last product of the forward that is repeated
        dy = s.part if s.cut else s.whole  # what a row-parallel product leaves for its weight gradient
        self.reach(temporary=s.gather + s.inner, gradients=dw)  # down
        self.add(DEFERRED, dy if later else 0)
        self.reach(temporary=2 * s.inner, gradients=dw)  # silu(gate) · up; down's input is still there, or gone
        self.add(ACTIVATIONS, -(2 if later else 3) * s.inner)
        self.add(held, 2 * s.inner)
        self.reach(temporary=again + s.whole + s.scatter, gradients=3 * dw)  # gate, up
        self.add(held, 0 if later else -2 * s.inner)
        self.add(ACTIVATIONS, -(1 if later else 2) * s.part - s.norm)
        self.reach(temporary=s.gather + s.query, gradients=3 * dw + dq)  # output
        self.add(DEFERRED, dy if later else 0)
        self.reach(temporary=2 * s.query + 2 * s.key, gradients=3 * dw + dq)  # attention
        self.add(ACTIVATIONS, -(1 if later else 2) * s.query - 2 * s.key - s.rows)
        self.add(held, s.query + 2 * s.key)
        self.reach(temporary=again + s.whole + s.scatter, gradients=3 * dw + 2 * dq + 2 * dk)  # query, key, value
        self.add(held, 0 if later else -s.query - 2 * s.key)
        self.add(ACTIVATIONS, -(0 if later else s.part) - s.norm)

    def _weight_gradients(self, stage: int) -> None:
        layout, s = self.layout, self.sizes
        units = self.units[stage]
        for index in reversed(range(len(units))):
            unit = units[index]
            fresh = unit.numel * layout.compute
            if unit.name == "head":
                self.add(DEFERRED, -layout.vocabulary * layout.model.dim * layout.compute)
            elif unit.name == "block":
                self.reach(temporary=2 * s.gather)
                self.add(DEFERRED, -s.query - 2 * s.key - 2 * s.inner - 2 * (s.part if s.cut else s.whole))
                self.add(ACTIVATIONS, -2 * s.part - s.query - s.inner)
            else:
                self.reach(gradients=fresh)
                self.add(DEFERRED, -s.whole - layout.tokens * 8)
            self.add(GRADIENTS, fresh)
        for index, unit in enumerate(units):
            self._finish_unit(stage, index, unit.numel * layout.compute)
