"""The listeners of a training run, in the order in which each step calls them (listener.py); and
how a run ends, or one data stage of it.

    data stage 0 │ save, wait │ leave │ find the checkpoint, join again, load │ data stage 1

Where one data stage follows another, in the same process, the run resumes: the data stage ends with
a checkpoint, everything is built anew for the next one by the code of a start, and the run begins
from the checkpoint. So it makes no difference whether the process is killed there, and a data stage
may have another layout.
"""

import sys

import torch.distributed as dist

from runtime.checkpoint.lease import Lease
from runtime.checkpoint.rollback import Rollback
from runtime.checkpoint.save import Saver
from runtime.checkpoint.saving import LeaseCheck, Saving
from runtime.evaluation.listener import Evaluation
from runtime.exit import describe
from runtime.garbage import GarbageCollection
from runtime.health.examine import Examination
from runtime.health.slow_ranks import SlowRanks
from runtime.listener import Listener, Run
from runtime.metrics.memory_report import MemoryReports
from runtime.metrics.metrics import Metrics, RecordWriter
from runtime.output import log
from runtime.profiling.profile import StepProfile
from runtime.profiling.trace import StepTrace
from runtime.start.checks import Data
from runtime.start.timing import StartTimes
from runtime.trainer_state import Start
from settings.config import Config


class Watching(Listener):
    """Lets the watchdog watch from the first step to the last."""

    def begins(self, run: Run) -> None:
        run.watchdog.start()

    def after_step(self, run: Run) -> None:
        run.watchdog.step_done(run.step, run.step_seconds)

    def went_back(self, run: Run, start: Start) -> None:
        run.watchdog.step_done(run.step, None)

    def closes(self, run: Run, error: BaseException | None) -> None:
        run.watchdog.close()


class Stopping(Listener):
    """Ends the run when all ranks have agreed to stop."""

    def begins(self, run: Run) -> None:
        run.stop.open()
        if run.stop.agreed:  # requested while the run started
            run.end(run.stop.reason)

    def after_step(self, run: Run) -> None:
        if run.stop.agree():
            run.end(run.stop.reason)

    def closes(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            run.stop.close(stays=run.changes_data_stage)
            if run.stop.agreed:  # the file STOP may have come since
                run.end(run.stop.reason)


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
            never = run.config.checkpoint.interval == "never"
            unsaved = "; checkpoint.interval=never: saved only on request" if never else ""
            none_left = run.step == run.start.step > 0
            more = "; none was left: to go on, raise train.steps" if none_left else ""
            said = f"finished after {run.step} steps{more}{unsaved}; {where}"
        if error is None:
            log(said, sys.stdout)
        run.log.end(state, reason, **run.for_status)


def build_listeners(run: Run, whole: Config, data: Data, lease: Lease) -> list[Listener]:
    """Build the listeners; every rank calls it, once the state of `run.start` has been loaded.

    whole: the configuration of the whole run.
    """
    config, train, start, mesh = run.config, run.train, run.start, run.train.mesh
    number = run.data_stage.number
    train_data, heldout_data = data.train[number], data.heldout[number]
    unigram = train_data.unigram_nats_per_token
    saver = Saver(train, train_data, lease, run.log)
    metrics = Metrics(config, mesh, start)
    # torch.compile leaves no product to time; a rank alone in its stage has no peers
    has_peers = mesh.sizes.world > mesh.sizes.pp
    times_products = config.guard.slow_ranks != "none" and not config.train.compile and has_peers
    slow_ranks = [SlowRanks(train)] if times_products else []
    examination = Examination(train) if config.guard.examine else None
    return [
        StartTimes(),  # first: begins when everything before the steps is ready
        StepProfile(config, mesh),  # close to the step, so that the trace has little else
        StepTrace(run.data_stage, mesh, start.step),  # likewise
        metrics,  # measures the step, before the listeners below take time
        EndRecorder(),  # closes before the metrics, whose trackers may wait for their servers
        *slow_ranks,  # what the listeners below compute is not timed
        Watching(),  # before all that may take longer than a step, and then says so (Run.pause)
        MemoryReports(train),
        Evaluation(heldout_data, unigram, data.tasks[number]),  # adds to the record
        LeaseCheck(lease),  # a displaced run ends here, and writes nothing below
        RecordWriter(metrics),
        *([examination] if examination else []),  # before those that react to skipped updates
        Stopping(),  # from here on, all ranks agree on stop and save requests
        Rollback(whole, data.train, saver),  # a run that rolls back does not save
        Saving(whole, data.train, saver, examination),
        GarbageCollection(),  # last: freezes what all the others have built
    ]
