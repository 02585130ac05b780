"""From one data stage of a run to the next, in the same process.

    0 │ save, wait for it │ leave │ find the checkpoint, join the world again, load │ 1

A boundary is a resume: the data stage ends with a checkpoint, everything is built anew for the next
one by the code of a start, and the run begins from the checkpoint. So it makes no difference
whether the process is killed there, and a data stage may have another layout.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from data.dataset import Mixture
from errors import RunFailed
from parallel.mesh import Mesh, build_mesh
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.load import find_before
from runtime.listener import Listener, Run
from runtime.log.events import append_event
from runtime.messages import log
from runtime.signals import Signals
from runtime.start.init import join_again
from runtime.trainer_state import Start
from settings.config import Config
from settings.data_stages import data_stages
from settings.load import changed_between, settings_of


def enter_stage(config: Config, start: Start, device: str, signals: Signals) -> Mesh:
    """The mesh of the data stage in which a run begins. Every rank calls it, when nothing of the
    one before is left.

    config: of the data stage.
    """
    if start.since is not None:
        join_again(signals)
    sizes = config.parallel.mesh_sizes(dist.get_world_size())
    return build_mesh(sizes, device, config.model.has_experts)


def find_next(run: Run, config: Config, data: Sequence[Mixture], lease: Lease) -> Start:
    """Where a run that changes its data stage goes on, once the checkpoint at the end of this one
    is committed. Called by every rank.

    Args:
        config: of the whole run.
        data: the training data of each data stage.

    Raises RunFailed if there is no checkpoint to go on from.
    """
    # Usually the checkpoint that was just saved; an earlier one if that is damaged.
    start = find_before(run.step, config, data, run.start, lease)
    if start is None:
        why = f"data stage {run.data_stage.number} has ended, its checkpoint is damaged, "
        why += "and there is no good one before it"
        raise RunFailed(why)
    return start


def next_start(run: Run) -> Start | None:
    """Where the process goes on, once nothing of the data stage is left; None: the run is over."""
    return run.following and replace(run.following, since=time.monotonic())


class DataStageBegins(Listener):
    """Logs and records the beginning of a data stage, with what changes:
    `train.seq_len 8192 → 131072`.

    config: of the whole run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def begins(self, run: Run) -> None:
        if not self.config.data_stages or dist.get_rank() != 0:
            return
        stages, number, steps = (
            data_stages(self.config),
            run.data_stage.number,
            run.data_stage.steps,
        )
        where = f"data stage {number} of 0 to {len(stages) - 1}, "
        where += f"steps {steps.start + 1} to {steps.stop}"
        if number == 0 or run.step > steps.start:
            log(f"this is {where}")
            return
        before, now = (settings_of(one.config) for one in stages[number - 1 : number + 1])
        changes = changed_between(before, now)
        about = {"data_stage": number, "step": run.step, "changes": changes}
        append_event(self.config.run.dir, "data_stage", **about)
        log(f"{where}, begins: {', '.join(changes) or 'nothing changes'}")
