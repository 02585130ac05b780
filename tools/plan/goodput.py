"""Effective training time and spare nodes of a job: what failures, saves and restarts cost it, in
closed forms, which tests/plan/test_goodput.py compares with a simulation.

    s  save     seconds for which training waits for a save
    w  commit   seconds from a save's beginning until a failure no longer loses it
    R  restart  seconds from a failure until the steps go on
    M  mtbf     mean seconds between failures
    τ  interval seconds of training between two saves

    shares of the time, to first order in 1/M:
    s/τ  saving    (τ/2 + w)/M  repeated steps    R/M  restarts

The sum is least at τ = √(2sM), whatever w and R are (Young; save_interval.py). Its minimum is
√(2s/M) + (w + R)/M: a shorter restart gains in proportion, a shorter save by the root.
"""

import math
from typing import Any, NamedTuple

from hardware import NODE_LOST_SHARE, Device
from runtime.checkpoint.save_interval import DAY, best_interval, mtbf_of, within_limits
from runtime.trainer_state import bytes_of_rank, state_bytes
from settings.config import Config


class Shares(NamedTuple):
    """The shares of a job's time."""

    saving: float
    repeated: float  # steps made twice
    restarting: float

    @property
    def effective(self) -> float:
        """Effective training time over all time: ETTR. Not below 0, where the first order does not
        hold."""
        return max(0.0, 1 - self.saving - self.repeated - self.restarting)


def goodput(config: Config, world: int, device: Device, step_seconds: float) -> dict[str, Any]:
    """The figures of a job on `world` GPUs, from planned bytes and assumed rates (hardware.py).

    Each rank copies its part of the weights and states to its host, while training waits, and all
    nodes write them once. (Without checkpoint.async_save it waits for this too.) A restart reads
    them twice: for the checksums, and to load them. The interval is checkpoint.interval, or what a
    run would choose if that is `auto`. With 0 and `never` it is None, and a failure costs all
    steps.
    """
    checkpoint, part = state_bytes(config), bytes_of_rank(config, world)
    nodes = math.ceil(world / device.gpus_per_node)
    save = part / device.host_bytes_per_second
    if config.parallel.offload == "disk":  # about two thirds are read, and all is written
        moved = part * 5 / 3 * device.gpus_of_node(world)
        save = max(save, moved / device.disk_bytes_per_second)
    written = checkpoint / (nodes * device.storage_bytes_per_second)
    commit = save + written
    if not config.checkpoint.async_save:
        save = commit
    mtbf = mtbf_of(config.checkpoint.failures_per_gpu_day, world)
    restart = device.restart_seconds + 2 * written
    seconds, interval = best_interval(save, mtbf), config.checkpoint.interval
    if interval == "auto":
        interval = max(1, math.ceil(within_limits(seconds, written) / step_seconds))
    steps = interval if isinstance(interval, int) and interval else None
    each = (steps or max(1, config.train.steps)) * step_seconds
    found = shares(each, save=save, commit=commit, restart=restart, mtbf=mtbf)
    missing = DAY / mtbf * NODE_LOST_SHARE * device.repair_days
    rare = math.isinf(mtbf)  # never
    return {
        "checkpoint_bytes": checkpoint,
        "save_seconds": save,
        "restart_seconds": restart,
        "mtbf_seconds": None if rare else mtbf,
        "interval_steps": steps,
        "best_interval_steps": None if rare else max(1, math.ceil(seconds / step_seconds)),
        "effective_training_time": found.effective,
        "repair_days": device.repair_days,
        "spare_nodes": spares_needed(missing),
    }


def describe_goodput(figures: dict[str, Any]) -> list[str]:
    """The lines of tools.plan."""
    if figures["mtbf_seconds"] is None:
        return []
    saves = "nothing is saved before the last step"
    if every := figures["interval_steps"]:
        saves = f"saves every {every:,} steps cost {figures['save_seconds']:.2g} s each"
    return [
        f"effective training time {figures['effective_training_time']:.1%}: a failure after "
        f"{figures['mtbf_seconds'] / 3600:,.1f} h costs {figures['restart_seconds'] / 60:,.1f} min "
        f"to restart; {saves} (best: {figures['best_interval_steps']:,} steps)",
        f"spare nodes {figures['spare_nodes']:,}: enough 99% of the time, if a lost node is "
        f"repaired in {figures['repair_days'] * 24:g} h",
    ]


def shares(interval: float, save: float, commit: float, restart: float, mtbf: float) -> Shares:
    """The first-order shares above, of the whole time; right where M ≫ τ, w and R."""
    return Shares(save / (interval + save), (interval / 2 + commit) / mtbf, restart / mtbf)


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
