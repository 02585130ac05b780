"""From one data stage of a run to the next, in the same process.

    data stage 0 │ save, wait │ leave │ find the checkpoint, join again, load │ data stage 1

A boundary is a resume: the data stage ends with a checkpoint, everything is built anew for the next
one by the code of a start, and the run begins from the checkpoint. So it makes no difference
whether the process is killed there, and a data stage may have another layout.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from runtime.checkpoint.folder import complete_checkpoints, step_of
from runtime.listener import Listener, Run
from runtime.messages import describe, log
from settings.config import SECTIONS, Config
from settings.data_stages import data_stages
from settings.load import changed_between


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
        before, now = (one.config for one in stages[number - 1 : number + 1])
        changes = changed_between(before, now, SECTIONS)
        run.log.event("data_stage", data_stage=number, step=run.step, changes=changes)
        log(f"{where}, begins: {', '.join(changes) or 'nothing changes'}")


class RunEnd(Listener):
    """Records how the run ended, or that another data stage follows. The run is `finished` only
    when every rank is."""

    def closes(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            dist.barrier()
        else:
            error.add_note(f"after step {run.step}")
        if error is None and run.changes_data_stage:
            return run.log.leave_data_stage()
        # after a failure, the time belongs to the step that failed
        run.log.ledger.spent("end" if error is None else "steps")
        run.log.write_spent()
        if dist.get_rank() != 0:
            return
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
        if error is None:
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
