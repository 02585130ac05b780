"""Simulates a run with failures, event by event, and accounts for its time.

    train τ │s│ train τ │s│ train … ✗ restart R │ train τ │s│ …
                        └ commit w ┘            └ from the last save that was committed

An event is a failure, a planned stop or the end of a repair; the saves between two events are
counted without visiting each.
"""

import heapq
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from runtime.checkpoints.goodput import DAY, Interruptions


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job on equal nodes. Times in seconds unless named otherwise."""

    nodes: int = 1
    failures_per_node_day: float = 0.0
    interval: float = 1800.0  # of training between two saves
    save: float = 0.0  # training waits for a save
    commit: float = 0.0  # from a save's beginning until it counts, its wait included
    restart: float = 0.0  # from a failure until the steps go on
    # planned stops per day: a save, and a restart; no step is lost
    stops_per_day: float = 0.0
    node_lost_share: float = 0.0  # of the failures: the node is missing until it is repaired
    repair_days: float = 1.0  # how long, on average; exponentially distributed
    spares: int = 0  # nodes beyond `nodes` that replace missing ones
    # with nodes missing, train on the rest at a speed in proportion; else wait for a repair
    shrinks: bool = False
    lemons: int = 0  # nodes, spares excluded, that fail `lemon_factor` times as often as the others
    lemon_factor: float = 1.0

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures while all nodes work; infinity if none fails."""
        rate = self.failures_per_node_day * (
            self.nodes - self.lemons + self.lemons * self.lemon_factor
        )
        return DAY / rate if rate else float("inf")

    @property
    def costs(self) -> Interruptions:
        return Interruptions(
            save=self.save, commit=self.commit, restart=self.restart, mtbf=self.mtbf
        )


@dataclass
class Account:
    """Where the time of a simulated run went, in seconds."""

    steps: float = 0.0  # that are part of the final result, as if with all nodes
    repeated: float = 0.0  # steps that were lost
    saving: float = 0.0
    restarting: float = 0.0
    waiting: float = 0.0  # for a repair
    slower: float = 0.0  # more time for the same steps with fewer nodes
    failures: int = 0
    longest_queue: int = field(default=0)  # the most nodes under repair at once

    @property
    def total(self) -> float:
        return (
            self.steps + self.repeated + self.saving + self.restarting + self.waiting + self.slower
        )

    @property
    def effective(self) -> float:
        """ETTR."""
        return self.steps / self.total if self.total else 1.0

    def shares(self) -> dict[str, float]:
        """The share of each part of the time."""
        total = self.total or 1.0
        parts = asdict(self)
        return {
            name: parts[name] / total
            for name in ("steps", "repeated", "saving", "restarting", "waiting", "slower")
        }


def simulate(
    job: Job, seconds: float, seed: int = 0, gaps: Iterator[float] | None = None
) -> Account:
    """Simulate `seconds` of a job.

    gaps: the seconds from each failure to the next, the first from the beginning, instead of random
    ones; the simulation ends with them. Nodes are then all alike and none is lost.
    """
    draw, account = random.Random(seed), Account()
    repairs: list[tuple[float, bool]] = []  # (when a node returns, whether it is a lemon)
    lemons, now, next_stop = job.lemons, 0.0, float("inf")
    if job.stops_per_day:
        next_stop = draw.expovariate(job.stops_per_day / DAY)

    def working() -> int:
        return min(job.nodes, job.nodes + job.spares - len(repairs))

    def next_failure() -> float:
        if gaps is not None:
            return now + next(gaps, float("inf"))
        bad = min(lemons, working())
        rate = job.failures_per_node_day * (working() - bad + bad * job.lemon_factor) / DAY
        return now + draw.expovariate(rate) if rate else float("inf")

    def returned() -> None:
        nonlocal lemons
        while repairs and repairs[0][0] <= now:
            lemons += heapq.heappop(repairs)[1]

    failure = next_failure()
    while now < seconds:
        returned()
        enough = working() == job.nodes or (job.shrinks and working() > 0)
        if not enough:  # nothing runs, so nothing fails
            until = min(repairs[0][0], seconds)
            account.waiting += until - now
            now = until
            failure = next_failure()
            continue
        next_stop = max(next_stop, now)  # one that came due during a restart or a wait
        end = min(failure, next_stop, seconds)
        speed = working() / job.nodes
        if job.shrinks and speed < 1 and repairs:  # a node that returns is taken in by a stop
            end = min(end, repairs[0][0])
        _run(job, account, end - now, speed, fails=end == failure)
        now = end
        if end >= seconds:
            break
        if end == failure:
            account.failures += 1
            returned()
            if gaps is None and draw.random() < job.node_lost_share:
                bad = min(lemons, working())
                weight = bad * job.lemon_factor
                is_lemon = draw.random() * (working() - bad + weight) < weight
                lemons -= is_lemon
                back = now + draw.expovariate(1 / (job.repair_days * DAY))
                heapq.heappush(repairs, (back, is_lemon))
                account.longest_queue = max(account.longest_queue, len(repairs))
        else:  # a planned stop: the save is waited for
            account.saving += job.commit
            now += job.commit
            if end == next_stop:
                next_stop = now + draw.expovariate(job.stops_per_day / DAY)
        failure = next_failure()
        # failures during a restart begin it anew
        while now < seconds and failure < now + job.restart:
            account.restarting += failure - now
            now = failure
            account.failures += 1
            failure = next_failure()
        took = max(0.0, min(job.restart, seconds - now))
        account.restarting += took
        now += took
    return account


def _run(job: Job, account: Account, elapsed: float, speed: float, fails: bool) -> None:
    """Account for `elapsed` seconds of training and saving. Without a failure, the last save is
    complete and nothing is lost: a planned stop saves."""
    # a save waits for the one before to be committed
    cycle = max(job.interval + job.save, job.commit)
    whole, rest = divmod(elapsed, cycle)
    trained = whole * job.interval + min(rest, job.interval)
    kept = trained
    if fails:
        # save n begins n intervals and n - 1 saves after the start, and counts `commit` later
        committed = max(0.0, (elapsed - job.commit + (cycle - job.interval)) // cycle)
        kept = min(trained, committed * job.interval)
    account.steps += kept * speed
    account.slower += kept * (1 - speed)
    account.repeated += trained - kept
    account.saving += elapsed - trained
