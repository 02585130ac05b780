"""Turn a schedule into programs: each rank's actions, with the sends and receives between them.
Pure Python, no torch.

Between GPUs a message is transferred only when both sides have posted it: NCCL buffers nothing and
matches messages only by their order, and whatever a rank posts waits for what it posted before.
Ranks that post in different orders wait for each other forever. So all messages are put into *one*
order, by the time at which each would be ready if a forward, an input gradient and a weight
gradient took one unit of time each, and a message a little (`MESSAGE`). Every rank posts its own
messages in that order. This rules out deadlock: consider the first message that has not been
transferred. Everything that its two ranks must compute or exchange before it comes earlier in the
same order, so it has been done.

    rank 0   F0 ─send F0▸─ F1 ─send F1▸─ F2 …
    rank 1      ─receive▸─ ─receive▸─ F0 ─send F0▸─ ─receive▸─ F1 …

A receive is posted at the instant at which its message is ready, before the action that runs during
the transfer; only the action that needs the message waits for it. So communication overlaps
computation: on a GPU a message begins to arrive when the rank has computed all that it launched
before posting the receive, and without `MESSAGE` that would include the action that was to hide it.
All that a rank sends and receives at one instant is one batch (`Exchange`). Between two stages of
one rank nothing is sent.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from parallel.pipeline.actions import Action, Message, Schedule, result_of, stage_ranks
from parallel.pipeline.simulate import Costs, Event, simulate

# Small, because an order for long messages holds back short ones; of 0 to 1, this loses least over
# all schedules. A sum of such powers of two is exact, so instants that are equal stay so.
MESSAGE = 2**-6


class Transfer(NamedTuple):
    """One rank's side of a message."""

    sends: bool  # else it receives
    peer: int  # the other rank
    message: Message


class Exchange(NamedTuple):
    """Sends and receives that a rank posts together."""

    transfers: tuple[Transfer, ...]


Program = list[Action | Exchange]


def lower(schedule: Schedule) -> list[Program]:
    """The program of each rank."""
    ranks_of_stages = stage_ranks(schedule)
    num_stages = len(ranks_of_stages)
    timeline = simulate(schedule, Costs.equal(num_stages, communication=MESSAGE))
    # All messages in one order: (instant, message, sender, receiver).
    messages = []
    for sender, events in enumerate(timeline):
        for action, _, end in events:
            message = result_of(action, num_stages)
            if message is not None and ranks_of_stages[message.stage] != sender:
                messages.append((end, message, sender, ranks_of_stages[message.stage]))
    messages.sort()
    mine: list[list[tuple[float, Transfer]]] = [[] for _ in schedule]  # each rank's part of them
    for instant, message, sender, receiver in messages:
        mine[sender].append((instant, Transfer(True, receiver, message)))
        mine[receiver].append((instant, Transfer(False, sender, message)))
    return [_program(*of_rank) for of_rank in zip(timeline, mine, strict=True)]


def _program(events: Sequence[Event], transfers: Sequence[tuple[float, Transfer]]) -> Program:
    """Merge a rank's actions and exchanges: an exchange comes after the actions that have ended by
    its instant."""
    program: Program = []
    instants = groupby(transfers, key=itemgetter(0))
    exchanges = [(at, Exchange(tuple(t for _, t in together))) for at, together in instants]
    exchanges.reverse()
    for action, _, end in events:
        while exchanges and exchanges[-1][0] < end:
            program.append(exchanges.pop()[1])
        program.append(action)
    program += [exchange for _, exchange in reversed(exchanges)]
    return program
