"""From one stage of a run to the next, in the same process.

    stage 0 │ save, wait for it │ leave │ find the checkpoint, join the world again, load │ stage 1

A boundary is a resume: the stage ends with a checkpoint, everything is built anew for the next
stage by the code of a start, and the run begins from the checkpoint. So it makes no difference
whether the process is killed there, and a stage may have another layout. After a rollback to a
checkpoint of an earlier stage, the run goes on in the same way, with that stage.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from data.dataset import Mixture
from errors import RunFailed
from parallel.mesh import Mesh, build_mesh
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.load import Start, find_before
from runtime.listener import Listener, Run
from runtime.log.events import append_event
from runtime.messages import log
from runtime.signals import Signals
from runtime.start.init import join_again
from settings.config import Config
from settings.load import changed_between, settings_of


def enter_stage(config: Config, start: Start, device: str, signals: Signals) -> tuple[Config, Mesh]:
    """The configuration of the stage in which a run begins, and its mesh. Every rank calls it, when
    nothing of a stage before is left."""
    if start.since is not None:
        join_again(signals)
    config = config.at_stage(start.stage)
    sizes = config.parallel.mesh_sizes(dist.get_world_size())
    return config, build_mesh(sizes, device, config.model.has_experts)


def find_next(run: Run, data: Sequence[Mixture], lease: Lease) -> Start:
    """Where a run that changes its stage goes on, once the stage's checkpoint is committed. Called
    by every rank.

    data: the training data of each stage.

    Raises RunFailed if there is no checkpoint to go on from.
    """
    start = run.start
    if not run.leaves:
        # Usually the checkpoint that the stage has just saved; an earlier one if that is damaged.
        start = find_before(run.step, run.config, data, run.start, lease)
        if start.path is None:
            why = f"stage {run.config.stage} has ended, its checkpoint is damaged, "
            why += "and there is no good one before it"
            raise RunFailed(why)
    return replace(start, gone_back=run.start.gone_back)


def next_start(run: Run) -> Start | None:
    """Where the process goes on, now that nothing of the stage is left; None if the run is over."""
    return run.following and replace(run.following, since=time.monotonic())


class StageBegins(Listener):
    """Logs and records the beginning of a stage, with what changes."""

    def begins(self, run: Run) -> None:
        config = run.config
        if not config.stages or dist.get_rank() != 0:
            return
        stage, steps = config.stage, config.steps
        where = (
            f"stage {stage} of 0 to {len(config.stages)}, steps {steps.start + 1} to {steps.stop}"
        )
        if stage == 0 or run.step > steps.start:
            log(f"this is {where}")
            return
        changes = changes_of(config)
        append_event(config.run.dir, "stage", stage=stage, step=run.step, changes=changes)
        log(f"{where}, begins: {', '.join(changes) or 'nothing changes'}")


def changes_of(config: Config) -> list[str]:
    """What a stage changes: `train.seq_len 8192 → 131072`."""
    before = config.at_stage(config.stage - 1)
    return changed_between(settings_of(before), settings_of(config))
