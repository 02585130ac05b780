"""Schedules are complete, in order and free of deadlock, and have the step time and memory that
their papers state. The checker finds broken ones."""

import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise, product

import pytest

from costs.timeline import Timeline
from errors import UserError
from parallel.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Fault,
    Message,
    forward_only,
    need_of,
    stage_ranks,
)
from parallel.pipeline.check import check, check_exchanges, check_order, fault_in, num_microbatches
from parallel.pipeline.lower import Exchange, lower
from parallel.pipeline.schedules import SCHEDULES, build_schedule
from parallel.pipeline.simulate import Costs, simulate
from tests import ROOT
from tests.planted import name_of
from tests.proofs.parity_tiers import thorough_but
from tools.timeline.panels import ascii_lanes

# --- correctness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", thorough_but([1, 2, 3, 4, 8], [1, 2, 3, 4, 5, 6, 8]))
def test_every_size_is_complete_in_order_and_free_of_deadlock(name, p):
    """So is evaluation, which runs only forwards. In each direction there is one message for each
    boundary between ranks and micro-batch."""
    taken = 0
    for v, m in product((1, 2, 3, 4), (1, 2, 3, 4, 5, 8, 11, 12, 16)):
        try:
            schedule = build_schedule(name, p, v, m)
        except UserError:  # it does not support these sizes
            continue
        taken += 1
        check(schedule)
        where = stage_ranks(schedule)
        assert len(where) == p * v
        assert num_microbatches(schedule) == m
        forwards = forward_only(where, m)
        check_order(forwards)
        check_exchanges(lower(forwards), forwards)
        assert sum(map(len, forwards)) == p * v * m
        entries = [entry for program in lower(schedule) for entry in program]
        sends = [t.sends for e in entries if isinstance(e, Exchange) for t in e.transfers]
        boundaries = sum(a != b for a, b in pairwise(where))
        assert sum(sends) == len(sends) - sum(sends) == 2 * boundaries * m
    assert taken > 0


# --- step time and memory, as in the papers -------------------------------------------------------

DEPTHS = thorough_but([2, 3, 4, 8], [2, 3, 4, 8, 16])


def compare(name, p, v, m, bubble, held, costs=(1, 1, 1)):
    """The bubble of a simulated step, and how many micro-batches of its stages each rank holds at
    most, are these; the rest of the step is work."""
    timeline = Timeline(simulate(build_schedule(name, p, v, m), Costs.equal(p * v, *costs)))
    step_time = m * v * sum(costs) + bubble
    assert timeline.bubble == pytest.approx(bubble)
    assert timeline.step_time == pytest.approx(step_time)
    assert timeline.bubble_fraction == pytest.approx(bubble / step_time)
    assert [timeline.peak_live(r) for r in range(p)] == held


@pytest.mark.parametrize("p", DEPTHS)
@pytest.mark.parametrize("costs", [(1, 1, 1), (1.0, 1.25, 0.5), (2, 1, 1.5)])
def test_gpipe_and_1f1b(p, costs):
    """Both have the bubble (p − 1)(F + B) for any costs. Rank r holds at most m micro-batches in
    GPipe, and min(m, p − r) in 1F1B."""
    bubble = (p - 1) * sum(costs)
    for m in sorted({1, p - 1, p, 2 * p, 4 * p}):
        compare("gpipe", p, 1, m, bubble, [m] * p, costs)
        compare("1f1b", p, 1, m, bubble, [min(m, p - r) for r in range(p)], costs)


@pytest.mark.parametrize("p", DEPTHS)
@pytest.mark.parametrize("v", [1, 2, 3, 4, 8])
def test_interleaved_1f1b_and_breadth_first(p, v):
    """Both have the bubble (p − 1)(F + B) with stages of 1/v of the size, which is a fraction
    (p − 1) / (v m) of the work (Narayanan et al., 2.2)."""
    for m in (p, 2 * p, 8 * p):
        warmup = [(v - 1) * p + (2 if v > 1 else 1) * (p - 1 - r) for r in range(p)]
        held = [min(m * v, each + 1) for each in warmup]
        compare("interleaved_1f1b", p, v, m, 3 * (p - 1), held)
        compare("breadth_first", p, v, m, 3 * (p - 1), [m * v] * p)


@pytest.mark.parametrize("p", DEPTHS)
def test_zb_h1(p):
    """ZB-H1 has the bubble (p − 1)(F + I − W), a third of 1F1B's if all costs are equal, and on
    every rank the memory of 1F1B's first rank (Qi et al. 2023, table 2). So it is for other costs,
    if weight gradients are no longer than the gaps that they fill."""
    for m in (p, 2 * p, 4 * p, 8 * p):
        compare("zb_h1", p, 1, m, p - 1, [p] * p)
        other = Timeline(simulate(build_schedule("zb_h1", p, 1, m), Costs.equal(p, 1, 1.25, 0.75)))
        assert other.bubble == pytest.approx((p - 1) * 1.5)


@pytest.mark.parametrize("p", DEPTHS)
def test_zb_v_and_dualpipe_v(p):
    """ZB-V has no bubble if F = I = W, with the memory of 1F1B's first rank: 2 p micro-batches of
    stages of half the size (Qi et al. 2024, table 1). DualPipeV has the bubble (p − 1)(F + I − W)
    and holds one half more."""
    for m in (2 * p - 1, 2 * p, 4 * p, 8 * p):
        timeline = Timeline(simulate(build_schedule("zb_v", p, 2, m), Costs.equal(2 * p)))
        assert timeline.bubble == pytest.approx(0)
        # rank r begins, and ends, r forwards later
        assert timeline.step_time == pytest.approx(6 * m + p - 1)
        assert max(timeline.peak_live(r) for r in range(p)) == 2 * p
    for m in (2 * p, 4 * p):
        compare("dualpipe_v", p, 2, m, p - 1, [2 * p + 1] * p)


def test_communication_delays_the_next_rank_only_and_each_stages_costs_count():
    """On two ranks a step of one micro-batch takes F, message, F, B, message, B. Two stages on the
    same rank do not wait for messages between them."""
    costs = Costs.equal(2, communication=0.5)
    step = Timeline(simulate(build_schedule("1f1b", 2, 1, 1), costs))
    assert step.step_time == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert Timeline(simulate(build_schedule("interleaved_1f1b", 1, 2, 1), costs)).step_time == 6
    # With a slow last stage, the step takes m times that stage's time, plus one forward and one
    # backward of the other stages.
    costs = Costs([1, 1, 1, 3], [1, 1, 1, 3], [1, 1, 1, 3])
    assert Timeline(simulate(build_schedule("1f1b", 4, 1, 8), costs)).step_time == 3 + 8 * 9 + 2 * 3


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "key", "why"),
    [
        ("1f1b", 4, 2, 8, "parallel.stages_per_rank", "one stage per rank"),
        ("zb_v", 4, 1, 8, "parallel.stages_per_rank", "2 stages per rank"),
        ("interleaved_1f1b", 4, 2, 6, "parallel.schedule", "groups of parallel.pp=4"),
        ("dualpipe_v", 4, 2, 7, "parallel.schedule", "at least 2 · parallel.pp = 8"),
    ],
)
def test_names_and_sizes_that_do_not_exist_are_refused(name, p, v, m, key, why):
    with pytest.raises(UserError, match=why) as refused:
        build_schedule(name, p, v, m)
    assert refused.value.key == key


# --- the checker finds broken schedules -----------------------------------------------------------


def swapped(rank, *two):
    """Swap two entries of this rank, each given by its index or, if it is an action, by itself."""

    def mistake(programs):
        entries = programs[rank]
        a, b = (entries.index(each) if isinstance(each, tuple) else each for each in two)
        entries[a], entries[b] = entries[b], entries[a]

    return mistake


def missing_action(broken):
    broken[2].remove(Action(BACKWARD_WEIGHT, 2, 5))  # which nothing waits for


def missing_backward(broken):
    for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT):
        broken[0].remove(Action(kind, 0, 5))  # which no other stage waits for


def double_action(broken):
    broken[2].append(Action(FORWARD, 2, 5))


def stage_on_two_ranks(broken):
    broken[1].append(broken[0].pop())


def half_a_backward(broken):
    broken[0][broken[0].index(Action(BACKWARD_INPUT, 0, 3))] = Action(BACKWARD, 0, 3)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (stage_on_two_ranks, "is on rank 0 and on rank 1"),
        (half_a_backward, "stage 0 runs B, F, W for micro-batch 3"),
        (missing_action, "stage 2 runs F, I for micro-batch 5"),
        (missing_backward, "stage 0 runs F for micro-batch 5"),
        (double_action, r"F2\.5 occurs more than once"),
        pytest.param(swapped(0, (FORWARD, 0, 5), (BACKWARD_INPUT, 0, 5)), "rank 0 at",
                     id="a backward before its forward"),
        pytest.param(swapped(2, (BACKWARD_INPUT, 2, 5), (BACKWARD_WEIGHT, 2, 5)), "rank 2 at",
                     id="a weight gradient before its input gradient"),
        pytest.param(swapped(3, (FORWARD, 3, 0), (FORWARD, 3, 7)), "rank 3 at",
                     id="what another rank needs first comes last"),
    ],
    ids=name_of,
)  # fmt: skip
def test_a_broken_schedule_is_found(mistake, said):
    """In ZB-H1 on four ranks."""
    broken = [list(actions) for actions in build_schedule("zb_h1", 4, 1, 8)]
    mistake(broken)
    with pytest.raises(Fault, match=said):
        check(broken)


def both_send_first(programs):
    """Rank 1 sends the gradient 1 before it receives micro-batch 2, rank 0 the other way round."""
    at = {e.transfers[0].message: i for i, e in enumerate(programs[0]) if isinstance(e, Exchange)}
    receive = programs[0].pop(at[Message(True, 0, 1)])
    programs[0].insert(at[Message(False, 1, 2)], receive)


def receive_that_nobody_sends(programs):
    lost = Message(False, 1, 3)
    programs[0] = [
        e for e in programs[0] if not (isinstance(e, Exchange) and e.transfers[0].message == lost)
    ]


def unknown_action(programs):
    programs[1].append(Action(FORWARD, 1, 9))


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (both_send_first, "a deadlock"),
        pytest.param(swapped(1, 0, 1), "is matched with", id="two receives in another order"),
        pytest.param(swapped(1, 0, 2), "a deadlock", id="a receive after its use"),
        pytest.param(swapped(0, 0, 1), "before it has made it", id="a send before its action"),
        (receive_that_nobody_sends, "rank 0 stops before B0.2"),
        (unknown_action, "other actions"),
    ],
    ids=name_of,
)
def test_a_wrong_exchange_is_found(mistake, said):
    """In 1F1B on two ranks."""
    schedule = build_schedule("1f1b", 2, 1, 4)
    programs = lower(schedule)
    mistake(programs)
    with pytest.raises(Fault, match=said):
        check_exchanges(programs, schedule)


def test_ten_thousand_actions_on_each_rank_take_seconds():
    """To build, simulate and check them takes about a second of CPU time, so every start can check
    its schedule. If the time grew with the square of the actions, it would be minutes."""
    began = time.process_time()
    schedule = build_schedule("zb_v", 4, 2, 1664)
    simulate(schedule, Costs.equal(8))
    check(schedule)
    assert time.process_time() - began < 10
    assert all(len(actions) > 9900 for actions in schedule)


@pytest.mark.parametrize("other", [(4, 1, 7), (3, 1, 8)], ids=str)
def test_a_schedule_of_other_sizes_is_found(other, monkeypatch):
    """It would train on a part of the batch, or leave a rank without work. Control: its own."""
    monkeypatch.setitem(SCHEDULES, "other", lambda *_: build_schedule("1f1b", *other))
    assert "micro-batches" in fault_in("other", 4, 1, 8)
    assert not fault_in("other", *other)
    longer = build_schedule("1f1b", 4, 1, 9)
    shifted = [[a._replace(microbatch=a.microbatch - 1) for a in rank] for rank in longer]
    monkeypatch.setitem(SCHEDULES, "other", lambda *_: shifted)
    assert "micro-batch" in fault_in("other", 4, 1, 8), "-1 is the last, as an index"


# --- messages beside computation ------------------------------------------------------------------


def on_two_streams(programs, costs, message):
    """The time of a step on GPUs: each rank computes on one stream and communicates on another. A
    batch begins when the one before has ended and all that was launched before it is computed; a
    message takes `message` from when both its ranks have begun."""
    where = stage_ranks([[e for e in p if isinstance(e, Action)] for p in programs])
    begun, arrived, ends = {}, {}, [(0.0, 0.0) for _ in programs]  # computing, communicating
    left = [list(program) for program in programs]
    posted = [[] for _ in programs]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(left):
            computed, sent = ends[rank]
            while program:
                if isinstance(program[0], Exchange):
                    posted[rank].append((computed, program[0].transfers))
                else:
                    need = need_of(program[0], len(where))
                    if need is not None and where[need.sender] != rank:
                        if need not in arrived:
                            break
                        computed = max(computed, arrived[need])
                    computed += costs.of(program[0].kind, program[0].stage)
                program.pop(0)
                moved = True
            for ready, transfers in list(posted[rank]):
                own = {(t.message, t.sends): max(ready, sent) for t in transfers}
                begun |= {each: at for each, at in own.items() if each not in begun}
                if not all((t.message, not t.sends) in begun for t in transfers):
                    break
                for t in transfers:
                    both = begun[t.message, True], begun[t.message, False]
                    arrived[t.message] = max(both) + message
                sent = max(arrived[t.message] for t in transfers)
                posted[rank].pop(0)
                moved = True
            ends[rank] = computed, sent
    assert not any(left)
    return max(computed for computed, _ in ends)


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [
        *(("gpipe", 4, 1, 8), ("1f1b", 4, 1, 32), ("interleaved_1f1b", 4, 10, 32)),
        *(("breadth_first", 4, 4, 16), ("zb_h1", 4, 1, 32), ("zb_v", 8, 2, 32)),
        ("dualpipe_v", 8, 2, 32),
    ],
)
def test_messages_travel_beside_actions(name, p, v, m, monkeypatch):
    """A step on GPUs takes what the simulator says, as the planner counts on: a message delays
    only what cannot run without it. Control: receives posted when they are needed."""
    message, costs = 0.05, Costs.equal(p * v, 1, 1.2, 0.9)
    schedule = build_schedule(name, p, v, m)
    step = Timeline(simulate(schedule, replace(costs, communication=message))).step_time
    assert on_two_streams(lower(schedule), costs, message) == pytest.approx(step, rel=2e-4)
    monkeypatch.setattr("parallel.pipeline.lower.MESSAGE", 0)
    assert on_two_streams(lower(schedule), costs, message) > step * 1.0005


# --- docstrings and imports -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "v", "m"),
    [
        *(("gpipe", 1, 4), ("1f1b", 1, 6), ("interleaved_1f1b", 2, 4), ("breadth_first", 2, 4)),
        *(("zb_h1", 1, 6), ("zb_v", 2, 7), ("dualpipe_v", 2, 8)),
    ],
)
def test_the_timeline_in_the_docstring_is_the_schedule(name, v, m):
    timeline = Timeline(simulate(build_schedule(name, 4, v, m), Costs.equal(4 * v)))
    drawn = ascii_lanes(timeline, columns=92)
    shown = [line.strip() for line in (SCHEDULES[name].__doc__ or "").splitlines() if "▏" in line]
    assert shown == [line.strip() for line in drawn]


def test_pure_modules_need_no_torch():
    """Modules without tensors can be imported where torch is not installed; here the import of
    torch is made to fail."""
    modules = [f"parallel.pipeline.{n}" for n in ("actions", "schedules", "simulate", "lower")]
    modules += ["parallel.pipeline.balance", "costs.timeline", "parallel.pipeline.check"]
    modules += ["tools.timeline.panels"]
    code = f"import sys; sys.modules['torch'] = None\nfor m in {modules}: __import__(m)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
