"""Schedules as data: complete, in order, free of deadlock, and holding no more activations than their papers say."""

import pytest

from errors import UserError
from parallel.pipeline.schedule import SCHEDULES, Action, Kind, build_schedule, rank_of_stage

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 8, 16)]


def schedules():
    """Every schedule at every size that it takes: (name, ranks, stages per rank, micro-batches, the actions)."""
    for name in SCHEDULES:
        for ranks, microbatches in SIZES:
            for stages_per_rank in (1, 2, 3):
                try:
                    actions = build_schedule(name, ranks, stages_per_rank, microbatches)
                except UserError:
                    continue
                yield pytest.param(
                    ranks, stages_per_rank, microbatches, actions, id=f"{name}-{ranks}x{stages_per_rank}-{microbatches}"
                )


def batches(actions, ranks, num_stages):
    """What `Transfers.exchange` posts on one rank between its actions: per batch, sends and receives as (other rank, message).

    A message is named after the action that receives it.
    """
    posted = []
    for done, upcoming in zip([None, *actions], [*actions, None], strict=True):
        operations = []
        if done is not None:
            receiver = done.stage + (1 if done.kind is Kind.FORWARD else -1)
            if 0 <= receiver < num_stages:
                operations.append(("send", rank_of_stage(receiver, ranks), done._replace(stage=receiver)))
        if upcoming is not None:
            sender = upcoming.stage - (1 if upcoming.kind is Kind.FORWARD else -1)
            if 0 <= sender < num_stages:
                operations.append(("receive", rank_of_stage(sender, ranks), upcoming))
        posted.append(operations)
    return posted


def exchange_without_buffers(posted):
    """Run every rank's batches as a network that buffers nothing and matches messages of a pair of ranks by order alone.

    An operation completes when its counterpart is posted too and both are the oldest of their direction between the two ranks.
    A rank goes on to its next batch when all of the last is complete: stricter than the code, which leaves sends behind.

    Returns:
        How many batches each rank got through, and the messages that met a receive of another name.
    """
    position = [0] * len(posted)
    open_operations = [list(batches[0]) for batches in posted]
    mismatched = []
    moved = True
    while moved:
        moved = False
        for rank, operations in enumerate(open_operations):
            for operation in [o for o in operations if o[0] == "send"]:
                _, other, message = operation
                if operation != next(o for o in operations if o[:2] == ("send", other)):
                    continue  # not the oldest to that rank
                counterpart = next((o for o in open_operations[other] if o[:2] == ("receive", rank)), None)
                if counterpart is not None:
                    if counterpart[2] != message:
                        mismatched.append((message, counterpart[2]))
                    operations.remove(operation)
                    open_operations[other].remove(counterpart)
                    moved = True
        for rank in range(len(posted)):
            while not open_operations[rank] and position[rank] < len(posted[rank]) - 1:
                position[rank] += 1
                open_operations[rank] = list(posted[rank][position[rank]])
                moved = True
    done = [position[rank] + (not open_operations[rank]) for rank in range(len(posted))]
    return done, mismatched


@pytest.mark.parametrize(("ranks", "stages_per_rank", "microbatches", "actions"), list(schedules()))
def test_schedule(ranks, stages_per_rank, microbatches, actions):
    num_stages = ranks * stages_per_rank

    # Complete: every stage's forward and backward of every micro-batch, once, on the rank that has the stage.
    everything = [action for rank in actions for action in rank]
    wanted = {Action(kind, s, m) for kind in Kind for s in range(num_stages) for m in range(microbatches)}
    assert len(everything) == len(set(everything))
    assert set(everything) == wanted
    for rank, mine in enumerate(actions):
        assert {rank_of_stage(action.stage, ranks) for action in mine} == {rank}

    # In order: each action's inputs exist when it runs, if ranks run whenever they can.
    needs = {
        a: ([Action(Kind.FORWARD, a.stage - 1, a.microbatch)] if a.stage else [])
        if a.kind is Kind.FORWARD
        else [Action(Kind.FORWARD, a.stage, a.microbatch)]
        + ([Action(Kind.BACKWARD, a.stage + 1, a.microbatch)] if a.stage < num_stages - 1 else [])
        for a in wanted
    }
    done: set[Action] = set()
    queues = [list(mine) for mine in actions]
    while any(queues):
        ready = [queue for queue in queues if queue and all(need in done for need in needs[queue[0]])]
        assert ready, f"nobody can go on: {[str(queue[0]) for queue in queues if queue]}"
        done.update([queue.pop(0) for queue in ready])

    # No deadlock, and every message is the one expected, on a network that buffers nothing and knows only order.
    posted = [batches(mine, ranks, num_stages) for mine in actions]
    if ranks > 1:  # between stages of one rank there is no network
        finished, mismatched = exchange_without_buffers(posted)
        assert finished == [len(batches) for batches in posted]
        assert not mismatched


def peak_activations(actions):
    """The most micro-batches that were forward and not yet backward on a rank at once."""
    alive = peak = 0
    for action in actions:
        alive += 1 if action.kind is Kind.FORWARD else -1
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peak_of_gpipe_is_every_microbatch(p, m):
    assert [peak_activations(actions) for actions in build_schedule("gpipe", p, 1, m)] == [m] * p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peak_of_1f1b_is_the_depth_below(p, m):
    assert [peak_activations(actions) for actions in build_schedule("1f1b", p, 1, m)] == [min(m, p - r) for r in range(p)]


def test_1f1b_is_the_timeline_of_its_docstring():
    steady = [" ".join(f"{a.kind.value}{a.microbatch}" for a in rank) for rank in build_schedule("1f1b", 4, 1, 6)]
    assert steady[0] == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    assert steady[3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"


def test_unknown_schedule_names_those_that_exist():
    with pytest.raises(UserError, match="1f1b"):
        build_schedule("2f2b", 2, 1, 4)


def test_network_without_buffers_finds_a_deadlock():
    """The control: two ranks that both send first, one operation at a time, wait for each other for ever."""
    f, b = Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 0, 0)
    one_at_a_time = [[[("send", 1, f)], [("receive", 1, b)]], [[("send", 0, b)], [("receive", 0, f)]]]
    assert exchange_without_buffers(one_at_a_time) == ([0, 0], [])
    together = [[[("send", 1, f), ("receive", 1, b)]], [[("send", 0, b), ("receive", 0, f)]]]
    assert exchange_without_buffers(together) == ([1, 1], [])


def test_network_that_knows_only_order_finds_a_swap():
    """The control: two messages sent in the other order arrive as each other."""
    first, second = Action(Kind.FORWARD, 1, 0), Action(Kind.FORWARD, 1, 1)
    swapped = [[[("send", 1, second)], [("send", 1, first)]], [[("receive", 0, first)], [("receive", 0, second)]]]
    assert len(exchange_without_buffers(swapped)[1]) == 2
