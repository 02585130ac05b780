"""The pipeline schedules: pure functions from sizes to each rank's list of actions. No torch here.

To add one, write a function `(p ranks, v stages per rank, m micro-batches) → list of actions for
each rank` under `@schedule("name")`, with `stages_per_rank` if it accepts only one number. Nothing
else changes: the tests, the parity matrix, the timeline tool and the runner take every schedule in
this file.

The timelines show four ranks, as printed by `python -m tools.timeline`. A forward, an input
gradient and a weight gradient take one column each, a whole backward two. Numbers are
micro-batches; lower-case letters mark a rank's second stage.
"""

from collections import Counter
from collections.abc import Callable
from typing import Self

from errors import UserError
from parallel.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Kind,
)

ScheduleFunction = Callable[[int, int, int], list[list[Action]]]
SCHEDULES: dict[str, ScheduleFunction] = {}
STAGES_PER_RANK: dict[str, int] = {}  # schedule → the only number that it accepts


def schedule(
    name: str, stages_per_rank: int | None = None
) -> Callable[[ScheduleFunction], ScheduleFunction]:
    """Register a schedule under a name for `parallel.schedule`.

    Args:
        stages_per_rank: the only number that it accepts; None: any.
    """

    def register(function: ScheduleFunction) -> ScheduleFunction:
        SCHEDULES[name] = function
        if stages_per_rank is not None:
            STAGES_PER_RANK[name] = stages_per_rank
        return function

    return register


def build_schedule(
    name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> list[list[Action]]:
    """Each rank's actions under the schedule `name`.

    Raises:
        UserError: no schedule has this name (the message lists the names), or it does not support
            these sizes.
    """
    if name not in SCHEDULES:
        choices = f"choose one of {sorted(SCHEDULES)}"
        raise UserError("parallel.schedule", name, "there is no such schedule", choices)
    wanted = STAGES_PER_RANK.get(name, stages_per_rank)
    if stages_per_rank != wanted:
        key, stages = "parallel.stages_per_rank", "one stage" if wanted == 1 else f"{wanted} stages"
        why = f"schedule {name} runs {stages} per rank"
        raise UserError(key, stages_per_rank, why, f"set {key}={wanted}")
    return SCHEDULES[name](num_ranks, stages_per_rank, num_microbatches)


@schedule("gpipe", stages_per_rank=1)
def gpipe(p: int, v: int, m: int) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al. 2019, https://arxiv.org/abs/1811.06965).

        rank 0 ▏F0 F1 F2 F3                            B0─── B1─── B2─── B3───
        rank 1 ▏   F0 F1 F2 F3                   B0─── B1─── B2─── B3───
        rank 2 ▏      F0 F1 F2 F3          B0─── B1─── B2─── B3───
        rank 3 ▏         F0 F1 F2 F3 B0─── B1─── B2─── B3───

    Every rank holds the activations of all micro-batches at once. Bubble (p − 1)(F + B).
    """
    return breadth_first(p, 1, m)


@schedule("1f1b", stages_per_rank=1)
def one_forward_one_backward(p: int, v: int, m: int) -> list[list[Action]]:
    """1F1B (PipeDream-flush: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2).

        rank 0 ▏F0 F1 F2 F3                   B0─── F4 B1─── F5 B2───    B3───    B4───    B5───
        rank 1 ▏   F0 F1 F2             B0─── F3 B1─── F4 B2─── F5 B3───    B4───    B5───
        rank 2 ▏      F0 F1       B0─── F2 B1─── F3 B2─── F4 B3─── F5 B4───    B5───
        rank 3 ▏         F0 B0─── F1 B1─── F2 B2─── F3 B3─── F4 B4─── F5 B5───

    The bubble is that of GPipe, (p − 1)(F + B), but rank r never holds the activations of more than
    p − r micro-batches.
    """
    ranks = []
    for r in range(p):
        warmup = min(p - 1 - r, m)
        rank = _Rank().forward(r, times=warmup)
        for _ in range(m - warmup):  # steady state
            rank.forward(r).backward(r)
        rank.backward(r, times=warmup)
        ranks.append(rank.actions)
    return ranks


@schedule("interleaved_1f1b")
def interleaved_one_forward_one_backward(p: int, v: int, m: int) -> list[list[Action]]:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2): rank r has stages r, r + p, r + 2p, ….
    In the timeline v = 2, m = 4.

        rank 0 ▏F0 F1 F2 F3 f0 f1 f2 f3                   b0───    b1───    b2───    b3─── B0─── B1…
        rank 1 ▏   F0 F1 F2 F3 f0 f1 f2 f3          b0───    b1───    b2───    b3─── B0─── B1─── B2…
        rank 2 ▏      F0 F1 F2 F3 f0 f1 f2    b0─── f3 b1───    b2───    b3─── B0─── B1─── B2─── B3…
        rank 3 ▏         F0 F1 F2 F3 f0 b0─── f1 b1─── f2 b2─── f3 b3─── B0─── B1─── B2─── B3───

    Micro-batches go through a rank's v stages in groups of p: group 0 through the first stage, the
    second, …, then group 1. A stage has 1/v of a rank's work, so the bubble is 1/v of that of 1F1B,
    (p − 1)(F + B) / v, at v times the communication. The number of micro-batches must be a multiple
    of p, or at most p.
    """
    if m > p and m % p:
        raise UserError(
            "parallel.schedule",
            "interleaved_1f1b",
            f"runs micro-batches in groups of parallel.pp={p}, and {m} micro-batches leave an "
            "incomplete group",
            f"make their number a multiple of {p} (or at most {p}) through "
            "train.global_batch_size or train.micro_batch_size",
        )
    group = min(p, m)
    starts = range(0, m, group)
    order = [(chunk, start + i) for start in starts for chunk in range(v) for i in range(group)]
    ranks = []
    for r in range(p):
        forwards = [Action(FORWARD, chunk * p + r, i) for chunk, i in order]
        backwards = [Action(BACKWARD, (v - 1 - chunk) * p + r, i) for chunk, i in order]
        # The first backward comes when the group's first micro-batch has gone forward through all
        # stages and its gradient has come back to this rank.
        ahead = (v - 1) * group + (p - 1 - r) * (2 if v > 1 else 1)
        ranks.append(_one_to_one(forwards, backwards, ahead))
    return ranks


@schedule("breadth_first")
def breadth_first(p: int, v: int, m: int) -> list[list[Action]]:
    """Breadth-first pipeline (Lamy-Poirier 2022, https://arxiv.org/abs/2211.05953): stages are
    placed as in interleaved 1F1B, and all micro-batches go through a rank's first stage, then
    through its second, …. In the timeline v = 2, m = 4.

        rank 0 ▏F0 F1 F2 F3 f0 f1 f2 f3                            b0─── b1─── b2─── b3─── B0─── B1…
        rank 1 ▏   F0 F1 F2 F3 f0 f1 f2 f3                   b0─── b1─── b2─── b3─── B0─── B1─── B2…
        rank 2 ▏      F0 F1 F2 F3 f0 f1 f2 f3          b0─── b1─── b2─── b3─── B0─── B1─── B2─── B3…
        rank 3 ▏         F0 F1 F2 F3 f0 f1 f2 f3 b0─── b1─── b2─── b3─── B0─── B1─── B2─── B3───

    The bubble is 1/v of that of GPipe, (p − 1)(F + B) / v, for any number of micro-batches m ≥ p.
    (The weights of a stage are needed in only two intervals, so fully sharded weights could be
    gathered twice per step; `zero_stage` 3 gathers them twice per micro-batch in every schedule.)
    """
    ranks = []
    for r in range(p):
        stages = range(r, p * v, p)
        forwards = [Action(FORWARD, s, i) for s in stages for i in range(m)]
        backwards = [Action(BACKWARD, s, i) for s in reversed(stages) for i in range(m)]
        ranks.append(forwards + backwards)
    return ranks


@schedule("zb_h1", stages_per_rank=1)
def zero_bubble_h1(p: int, v: int, m: int) -> list[list[Action]]:
    """ZB-H1 (Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 2.1): 1F1B with the backward
    split.

        rank 0 ▏F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1 ▏   F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        rank 2 ▏      F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        rank 3 ▏         F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    The stage before waits only for input gradients, so they run first. Rank r runs its weight
    gradients r micro-batches later, when it would otherwise be idle. Bubble: (p − 1)(F + I − W), a
    third of 1F1B's if F = I = W. No rank holds the activations of more than p micro-batches, as
    many as rank 0 in 1F1B.
    """
    ranks = []
    for r in range(p):
        warmup = min(p - 1 - r, m)
        rank = _Rank().forward(r, times=warmup)
        for i in range(m):
            if warmup + i < m:
                rank.forward(r)
            rank.backward_input(r)
            if i >= r:
                rank.backward_weight(r)
        rank.backward_weight(r, times=min(m, r))
        ranks.append(rank.actions)
    return ranks


@schedule("zb_v", stages_per_rank=2)
def zero_bubble_v(p: int, v: int, m: int) -> list[list[Action]]:
    """ZB-V (Qi et al. 2024, https://arxiv.org/abs/2405.15362, section 4): two stages per rank,
    placed in a V: rank r has stages r and 2p − 1 − r. The loss is on rank 0, where backward can
    begin as soon as a micro-batch has gone down to the last rank and back up.

        rank 0 ▏F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 I0 W0 f4 i4 w4 I1 W1 f5 i5…
        rank 1 ▏   F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 i2 w2 F6 I0 W0 f4 i3 w3 I1 W1 f5 i4 w4…
        rank 2 ▏      F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 i1 w1 F5 I0 W0 f4 i2 w2 F6 I1 W1 f5 i3 w3 I2…
        rank 3 ▏         F0 f0 F1 f1 F2 f2 F3 f3 i0 w0 F4 I0 W0 f4 i1 w1 F5 I1 W1 f5 i2 w2 F6 I2 W2…

    If F = I = W and m ≥ 2p − 1, no rank waits between its first and its last action. If I > W, a
    rank waits about 2 (p − 1)(I − W), where I and W are those of one stage. A rank holds the
    activations of p micro-batches (2p halves), as rank 0 does in 1F1B.
    """
    ranks = []
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        # fill: the time until micro-batch 0 comes back up
        rank = _Rank().forward(down, times=2 * (p - r) - 1)
        for _ in range(r):
            rank.forward(up).forward(down)
        for _ in range(p - r):
            rank.forward(up).backward_input(up).backward_weight(up)
        # steady state: forward and backward of each stage in turn
        while rank.done(FORWARD, up) < max(m, 2 * p - 1):
            if rank.done(FORWARD, down) < max(m, 2 * p - 1):
                rank.forward(down)
            rank.backward_input(down).backward_weight(down)
            rank.forward(up).backward_input(up).backward_weight(up)
        for _ in range(r):  # drain: input gradients first, because other ranks wait for them
            rank.backward_input(down).backward_input(up)
        for _ in range(p - r):
            rank.backward_input(down).backward_weight(down)
        for stage in (up, down):
            due = rank.done(BACKWARD_INPUT, stage) - rank.done(BACKWARD_WEIGHT, stage)
            rank.backward_weight(stage, times=due)
        # built for at least 2p − 1 micro-batches: if there are fewer, drop the others
        ranks.append([action for action in rank.actions if action.microbatch < m])
    return ranks


@schedule("dualpipe_v", stages_per_rank=2)
def dualpipe_v(p: int, v: int, m: int) -> list[list[Action]]:
    """DualPipeV: the half of DeepSeek's DualPipe (DeepSeek-AI 2024,
    https://arxiv.org/abs/2412.19437, section 3.2.1) that needs only one copy of the weights, placed
    as in ZB-V (Qi et al. 2025, "Cut-in-half", https://hackmd.io/@ufotalent/r1lVXsa9Jg).

        rank 0 ▏F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 F7 b3─── f4 B0─── b4─── f5    B1…
        rank 1 ▏   F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 F6 b2─── f4 B0─── F7 b3─── f5 B1─── b4…
        rank 2 ▏      F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 F5 b1─── f4 B0─── F6 b2─── f5 B1─── F7 b3───…
        rank 3 ▏         F0 f0 F1 f1 F2 f2 F3 f3 F4 b0─── f4 B0─── F5 b1─── f5 B1─── F6 b2─── f6 B2…

    In the steady state each forward of one stage is paired with a whole backward of the other, so
    that communication inside one (the all-to-all of experts) can overlap computation of the other;
    here the two run one after the other. With nearly equal costs the bubble is (p − 1)(F + I − W),
    where F, I and W are those of one stage, half a rank's work. (The paper counts the pair as one
    action, whose results are sent together, and gets (p − 1)(F + 2 I − W).) A rank holds the
    activations of 2p + 1 halves.
    """
    if m < 2 * p:
        raise UserError(
            "parallel.schedule",
            "dualpipe_v",
            f"needs at least 2 · parallel.pp = {2 * p} micro-batches, but there are {m}",
            "use more or smaller micro-batches (train.global_batch_size, "
            "train.micro_batch_size), or zb_v",
        )
    ranks = []
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        rank = _Rank().forward(down, times=2 * (p - 1 - r))
        for _ in range(r + 1):
            rank.forward(down).forward(up)
        for _ in range(p - 1 - r):
            rank.backward_input(up).backward_weight(up).forward(up)
        # steady state: a forward of one stage paired with a backward of the other
        for _ in range(m - 2 * p + r + 1):
            rank.forward(down).backward(up).forward(up).backward(down)
        for _ in range(p - 1 - r):
            rank.backward(up).forward(up).backward(down)
        # Drain: 2 (r + 1) backwards, up and down in turn. In the second half only input gradients
        # run, because other ranks wait for them.
        left = [up, down] * (r + 1)
        for stage in left[: r + 1]:
            rank.backward(stage)
        waiting = left[r + 1 :]  # the stages whose weight gradients are due
        for stage in waiting:
            rank.backward_input(stage)
        for _ in range(p - 1 - r):
            rank.backward_weight(waiting.pop(0)).backward_input(down)
            waiting.append(down)
        for stage in waiting:
            rank.backward_weight(stage)
        ranks.append(rank.actions)
    return ranks


class _Rank:
    """Builds one rank's list. Each kind of action takes the micro-batches of a stage in order, and
    a whole backward counts as both its halves."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._done: Counter[tuple[Kind, int]] = Counter()

    def done(self, kind: Kind, stage: int) -> int:
        return self._done[kind, stage]

    def forward(self, stage: int, times: int = 1) -> Self:
        return self._do(FORWARD, stage, times, (FORWARD,))

    def backward(self, stage: int, times: int = 1) -> Self:
        return self._do(BACKWARD, stage, times, (BACKWARD_INPUT, BACKWARD_WEIGHT))

    def backward_input(self, stage: int) -> Self:
        return self._do(BACKWARD_INPUT, stage, 1, (BACKWARD_INPUT,))

    def backward_weight(self, stage: int, times: int = 1) -> Self:
        return self._do(BACKWARD_WEIGHT, stage, times, (BACKWARD_WEIGHT,))

    def _do(self, kind: Kind, stage: int, times: int, counts: tuple[Kind, ...]) -> Self:
        for _ in range(times):
            self.actions.append(Action(kind, stage, self.done(counts[0], stage)))
            self._done.update((count, stage) for count in counts)
        return self


def _one_to_one(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return [*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]]
