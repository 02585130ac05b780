"""How much of a run's time is effective when it fails now and then, and how often to save: closed
forms, which tests/plan/test_goodput.py compares with a simulation.

    s  save     seconds for which training waits for a save
    w  commit   seconds from a save's beginning until a failure no longer loses it
    R  restart  seconds from a failure until the steps go on
    M  mtbf     mean seconds between failures
    τ  interval seconds of training between two saves

    shares of the time, to first order in 1/M:
    s/τ  saving    (τ/2 + w)/M  repeated steps    R/M  restarts

The sum is least at τ = √(2sM), whatever w and R are (Young, "A first order approximation to the
optimum checkpoint interval", Communications of the ACM 17, 1974). Its minimum is √(2s/M) +
(w + R)/M: a shorter restart gains in proportion, a shorter save by the root.
"""

import math
from dataclasses import dataclass

DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """What saves and failures cost a job. All in seconds."""

    save: float  # s: training waits for each save
    commit: float  # w: from a save's beginning until it is committed, its wait included
    restart: float  # R: from a failure until the steps go on
    mtbf: float  # M: mean time between failures of the whole job


@dataclass(frozen=True)
class Shares:
    """The shares of a job's time."""

    saving: float
    repeated: float  # steps made twice
    restarting: float

    @property
    def effective(self) -> float:
        """Effective training time over all time: ETTR. Not below 0, where the first order does not
        hold."""
        return max(0.0, 1 - self.saving - self.repeated - self.restarting)


def mtbf_of(failures_per_gpu_day: float, gpus: int) -> float:
    """M, in seconds, of a job that any of its GPUs can interrupt; infinity if none fails."""
    per_day = failures_per_gpu_day * gpus
    return DAY / per_day if per_day else math.inf


def best_interval(save: float, mtbf: float) -> float:
    """Young's τ = √(2sM), in seconds; infinity if nothing fails."""
    return math.sqrt(2 * save * mtbf) if math.isfinite(mtbf) else math.inf


def shares(costs: Interruptions, interval: float) -> Shares:
    """The first-order shares above, of the whole time; right where M ≫ τ, w and R."""
    saving = costs.save / (interval + costs.save)
    repeated = (interval / 2 + costs.commit) / costs.mtbf
    return Shares(saving, repeated, costs.restart / costs.mtbf)


def spares_needed(mean_missing: float, certainty: float = 0.99) -> int:
    """The smallest number of spare nodes that suffices with this probability at any moment.

    mean_missing: how many nodes are under repair on average: nodes lost per day × days of a repair.
    Their number has a Poisson distribution, however long single repairs take, if nodes fail
    independently (the queue M/G/∞).
    """
    if not mean_missing:
        return 0
    spares, below = 0, math.exp(-mean_missing)
    while below < certainty and spares < 1_000_000:
        spares += 1
        # by logarithms: each factor of it may be too small or too large for a float
        log_probability = spares * math.log(mean_missing) - mean_missing - math.lgamma(spares + 1)
        below += math.exp(log_probability)
    return spares
