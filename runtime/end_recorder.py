"""How a run ends, or one data stage of it.

    data stage 0 │ save, wait │ leave │ find the checkpoint, join again, load │ data stage 1

Where one data stage follows another, in the same process, the run resumes: the data stage ends with
a checkpoint, everything is built anew for the next one by the code of a start, and the run begins
from the checkpoint. So it makes no difference whether the process is killed there, and a data stage
may have another layout.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from runtime.checkpoint.folder import complete_checkpoints, step_of
from runtime.exit import describe
from runtime.listener import Listener, Run
from runtime.output import log


class EndRecorder(Listener):
    """Records how the run ended, or that another data stage follows. The run is `finished` only
    when every rank is."""

    def closes(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            dist.barrier()
        else:
            error.add_note(f"after step {run.step}")
        if error is None and run.changes_data_stage:
            return run.log.leave_data_stage()
        # after a failure, the time belongs to what failed: a pause, or a step, which is lost
        run.log.ledger.spent("end" if error is None else run.log.cause or "lost")
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
