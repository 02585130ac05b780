"""Effective training time and spare nodes of a job: what failures, saves and restarts cost it."""

import math
from typing import Any

from hardware import NODE_LOST_SHARE, Device
from model.transformer import num_parameters
from runtime.checkpoint.goodput import (
    DAY,
    Interruptions,
    best_interval,
    mtbf_of,
    shares,
    spares_needed,
)
from settings.config import Config
from training.optimizers import state_bytes


def goodput(config: Config, world: int, device: Device, step_seconds: float) -> dict[str, Any]:
    """The figures of a job on `world` GPUs, from planned bytes and assumed rates (hardware.py).

    Each rank copies its part of the weights and states to its host, while training waits, and all
    nodes write them once. A restart reads them twice: for the checksums, and to load them. The
    interval is checkpoint.interval, or √(2sM) if that is `auto`. With 0 and `never` it is None, and
    a failure costs all steps.
    """
    checkpoint = num_parameters(config.model) * state_bytes(config)
    nodes = math.ceil(world / device.gpus_per_node)
    save = checkpoint * config.parallel.dp_replicate / world / device.host_bytes_per_second
    written = checkpoint / (nodes * device.storage_bytes_per_second)
    costs = Interruptions(
        save=save,
        commit=save + written,
        restart=device.restart_seconds + 2 * written,
        mtbf=mtbf_of(config.checkpoint.failures_per_gpu_day, world),
    )
    seconds, interval = best_interval(save, costs.mtbf), config.checkpoint.interval
    best = max(1, math.ceil(seconds / step_seconds)) if math.isfinite(seconds) else None
    steps = best if interval == "auto" else interval if isinstance(interval, int) else 0
    found = shares(costs, (steps or max(1, config.train.steps)) * step_seconds)
    missing = DAY / costs.mtbf * NODE_LOST_SHARE * device.repair_days
    return {
        "checkpoint_bytes": checkpoint,
        "save_seconds": save,
        "commit_seconds": costs.commit,
        "restart_seconds": costs.restart,
        "mtbf_seconds": costs.mtbf if math.isfinite(costs.mtbf) else None,
        "interval_steps": steps or None,
        "best_interval_steps": best,
        "effective_training_time": found.effective,
        "share_saving": found.saving,
        "share_repeated": found.repeated,
        "share_restarting": found.restarting,
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
