"""Prove, without running it, that a schedule is complete, correctly ordered and free of deadlock.
Pure Python, no torch.

The proof assumes the strictest network: it buffers nothing (a message is transferred only when both
sides have posted it), it matches messages only by their order, and a batch that a rank posts waits
until the rank's previous batch has completed.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from parallel.pipeline.actions import (
    Action,
    Fault,
    Kind,
    Message,
    Schedule,
    need_of,
    result_of,
    stage_ranks,
)
from parallel.pipeline.lower import Exchange, Program, Transfer, lower
from parallel.pipeline.schedules import SCHEDULES, ScheduleFunction, build_schedule
from parallel.pipeline.simulate import Costs, simulate


def check(schedule: Schedule) -> None:
    """Run all checks below on a schedule and the programs it is lowered to; raises `Fault`."""
    check_complete(schedule)
    check_order(schedule)
    check_exchanges(lower(schedule), schedule)


def fault_in(name: str, *sizes: int) -> str:
    """What is wrong with the schedule `name` for these sizes; empty if it is right."""
    return _fault_in(SCHEDULES.get(name), name, *sizes)


@lru_cache(maxsize=256)  # the stages and layouts of a run are checked several times, and are alike
def _fault_in(_: ScheduleFunction | None, name: str, *sizes: int) -> str:
    p, v, m = sizes
    try:
        schedule = build_schedule(name, *sizes)
        check(schedule)
    except Fault as fault:
        return str(fault)
    # complete for fewer micro-batches, it would train on a part of each batch
    has = len(schedule), len(stage_ranks(schedule)), num_microbatches(schedule)
    if has != (p, p * v, m):
        return f"has {has} ranks, stages and micro-batches, and not {(p, p * v, m)}"
    return ""


def num_microbatches(schedule: Schedule) -> int:
    return len({action.microbatch for actions in schedule for action in actions})


def splits_backward(schedule: Schedule) -> bool:
    """Whether some backward is split in two."""
    return any(action.kind is Kind.BACKWARD_INPUT for actions in schedule for action in actions)


def check_complete(schedule: Schedule) -> None:
    """Check that each stage is on one rank and runs, once for every micro-batch, a forward and a
    backward (whole or split in two)."""
    stages = len(stage_ranks(schedule))
    actions = [action for rank in schedule for action in rank]
    seen = set(actions)
    if len(seen) < len(actions):
        twice = next(action for action in actions if actions.count(action) > 1)
        raise Fault(f"{twice} occurs more than once")
    microbatches = num_microbatches(schedule)
    whole = {Kind.FORWARD, Kind.BACKWARD}
    split = {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    for s in range(stages):
        for m in range(microbatches):
            kinds = {kind for kind in Kind if Action(kind, s, m) in seen}
            if kinds not in (whole, split):
                has = ", ".join(sorted(kind.value for kind in kinds)) or "nothing"
                wanted = "F and B, or F, I and W"
                raise Fault(f"stage {s} runs {has} for micro-batch {m}, but needs {wanted}")


def check_order(schedule: Schedule) -> None:
    """Check that every action gets its inputs if each rank runs its list from first to last."""
    simulate(schedule, Costs.equal(len(stage_ranks(schedule))))


def check_exchanges(programs: Sequence[Program], schedule: Schedule) -> None:
    """Run the programs on a network that buffers nothing.

    Raises:
        Fault: ranks wait for each other or for an input that never arrives, a send is matched with
            the receive of another message, a message is sent before its action has run, or the
            actions are not those of the schedule.
    """
    where = stage_ranks(schedule)
    for rank, program in enumerate(programs):
        if [item for item in program if isinstance(item, Action)] != list(schedule[rank]):
            raise Fault(f"the program of rank {rank} has other actions than the schedule")
    position = [0] * len(programs)
    # the remaining transfers of each rank's current batch, oldest first
    batch: list[list[Transfer]] = [[] for _ in programs]
    posted: list[deque[Exchange]] = [deque() for _ in programs]  # that batch and all later ones
    made: set[Message | None] = set()  # the results of actions that have run
    # messages of completed batches: NCCL reports the completion of whole batches only
    received: set[Message] = set()
    awake = deque(range(len(programs)))
    while awake:
        rank = awake.popleft()
        moved = False
        # Compute until an action lacks its input. Posting a batch does not wait.
        while position[rank] < len(programs[rank]):
            item = programs[rank][position[rank]]
            if isinstance(item, Exchange):
                for transfer in item.transfers:
                    if transfer.sends and transfer.message not in made:
                        raise Fault(f"rank {rank} sends {transfer.message} before it has made it")
                posted[rank].append(item)
                if len(posted[rank]) == 1:
                    batch[rank] = list(item.transfers)
            else:
                need = need_of(item, len(where))
                if need is not None and need not in received and where[need.sender] != rank:
                    break
                made.add(result_of(item, len(where)))
            position[rank] += 1
            moved = True
        # Transfer: match this rank's current batch with the current batches of other ranks; when it
        # has completed, take the next one.
        peers = _match(rank, batch)
        awake.extend(peers)
        while posted[rank] and not batch[rank]:
            received.update(t.message for t in posted[rank].popleft().transfers if not t.sends)
            batch[rank] = list(posted[rank][0].transfers) if posted[rank] else []
            moved = True
        if moved or peers:
            awake.append(rank)
    for rank, program in enumerate(programs):
        if position[rank] < len(program) or batch[rank]:
            at = str(program[position[rank]]) if position[rank] < len(program) else "its end"
            waiting = [t.message for t in batch[rank]]
            raise Fault(f"rank {rank} stops before {at}, waiting for {waiting}: a deadlock")


def _match(rank: int, batch: list[list[Transfer]]) -> list[int]:
    """Complete the transfers that both `rank` and a peer have posted, and return these peers."""
    peers = []
    seen = set()  # (direction, peer): only the oldest transfer of each may complete
    for mine in list(batch[rank]):
        if (mine.sends, mine.peer) in seen:
            continue
        seen.add((mine.sends, mine.peer))
        for theirs in batch[mine.peer]:
            if theirs.peer == rank and theirs.sends != mine.sends:
                if theirs.message != mine.message:
                    ranks = f"ranks {rank} and {mine.peer}"
                    raise Fault(f"{ranks}: {mine.message} is matched with {theirs.message}")
                batch[rank].remove(mine)
                batch[mine.peer].remove(theirs)
                peers.append(mine.peer)
                break
    return peers
