"""The listeners of a training run, in the order in which each step calls them (listener.py)."""

from runtime.checkpoint.lease import Lease
from runtime.checkpoint.rollback import Rollback
from runtime.checkpoint.save import Saver
from runtime.checkpoint.saving import LeaseCheck, Saving
from runtime.end_recorder import EndRecorder
from runtime.evaluation.listener import Evaluation
from runtime.garbage import GarbageCollection
from runtime.health.examine import Examination
from runtime.health.slow_ranks import SlowRanks
from runtime.listener import Listener, Run
from runtime.metrics.memory_report import MemoryReports
from runtime.metrics.metrics import Metrics, RecordWriter
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


def build_listeners(run: Run, whole: Config, data: Data, lease: Lease) -> list[Listener]:
    """Build the listeners; every rank calls it, once the state of `run.start` has been loaded.

    whole: the configuration of the whole run.
    """
    config, train, start, mesh = run.config, run.train, run.start, run.train.mesh
    number = run.data_stage.number
    train_data, heldout_data = data.train[number], data.heldout[number]
    unigram = train_data.unigram_nats_per_token
    saver = Saver(train, train_data.tokenizer_path, lease, run.log)
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
