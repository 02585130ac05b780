"""From one stage of a run to the next, in the same process.

    stage 0 │ save, wait for it │ leave │ find the checkpoint, join the world again, load │ stage 1

A boundary is a resume: the stage ends with a checkpoint, everything is built anew for the next
stage by the code of a start, and the run begins from the checkpoint. So it makes no difference
whether the process is killed there, and a stage may have another layout. After a rollback to a
checkpoint of an earlier stage, the run goes on in the same way, with that stage.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from data.dataset import Mixture
from errors import RunFailed
from parallel.mesh import Mesh, build_mesh
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.load import Start, find_before
from runtime.checkpoint.names import complete_checkpoints, step_of
from runtime.listener import Listener, Run
from runtime.messages import describe, log
from settings.config import Config
from settings.load import changed_between, settings_of


def enter_stage(config: Config, start: Start, device: str) -> tuple[Config, Mesh]:
    """The configuration of the stage in which a run begins, and its mesh. Every rank calls it, when
    nothing of a stage before is left."""
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
        run.log.event("stage", stage=stage, step=run.step, changes=changes)
        log(f"{where}, begins: {', '.join(changes) or 'nothing changes'}")


class RunEnd(Listener):
    """Records how the run ended, or that the process goes on with another stage. It is `finished`
    only when every rank is."""

    def closes(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            dist.barrier()
        else:
            error.add_note(f"after step {run.step}")
        if error is None and run.changes_stage:
            return run.log.leave_stage()
        # after a failure, the time belongs to the step that failed
        run.log.ledger.spent("end" if error is None else "steps")
        run.log.write_spent()
        where = f"run folder {run.config.run.dir}"
        if error is not None:
            state, reason = "failed", describe(error)
        elif run.end_reason and run.step < run.config.train.steps:
            state, reason = "requeue", run.end_reason
            done = f"stopped after step {run.step}/{run.config.train.steps}: {reason}"
            said = f"{done}; restart it to continue; {where}"
        else:
            state, reason = "finished", "all steps done"
            said = f"finished after {run.step} steps{_unsaved(run)}; {where}"
        if error is None and dist.get_rank() == 0:
            log(said, sys.stdout)
        run.log.end(state, reason, **run.for_status)


def _unsaved(run: Run) -> str:
    """A warning if no checkpoint of the run folder has the state after the last step."""
    try:
        saved = complete_checkpoints(Path(run.config.run.dir) / "checkpoints")
    except OSError:  # a finished run has finished
        return ""
    if saved and step_of(saved[-1]) == run.step:
        return ""
    said = "; nothing was saved" + (f" after {saved[-1].name}" if saved else "")
    never = run.config.checkpoint.interval == "never"
    return said + (" (checkpoint.interval=never)" if never else "")


def changes_of(config: Config) -> list[str]:
    """What a stage changes: `train.seq_len 8192 → 131072`."""
    before = config.at_stage(config.stage - 1)
    return changed_between(settings_of(before), settings_of(config))
