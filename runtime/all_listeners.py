"""The listeners of a training run, in the order in which each step calls them (listener.py)."""

from parallel.mesh import Mesh
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.rollback import Rollback
from runtime.checkpoint.save import Saver
from runtime.checkpoint.saving import LeaseCheck, Saving
from runtime.evaluation.heldout import Evaluation
from runtime.evaluation.listener import Tasks
from runtime.garbage import GarbageCollection
from runtime.health.examine import Examination
from runtime.health.faults import Faults
from runtime.health.slow_ranks import SlowRanks
from runtime.listener import Listener
from runtime.metrics.memory_report import MemoryReports
from runtime.metrics.metrics import Metrics, RecordWriter
from runtime.monitor.rank_0 import Companion, CompanionListener
from runtime.next_stage import DataStageBegins
from runtime.profiling.profile import StepProfile
from runtime.profiling.trace import StepTrace
from runtime.signals import Signals
from runtime.start.checks import Data
from runtime.start.elastic import SparesEvent
from runtime.start.timing import StartTimes
from runtime.stop import StopRequests
from runtime.trainer_state import Start
from runtime.watchdog import Watchdog
from settings.config import Config
from settings.data_stages import DataStage
from training.step import TrainStep


def build_listeners(
    whole: Config,
    data_stage: DataStage,
    mesh: Mesh,
    train: TrainStep,
    start: Start,
    data: Data,
    lease: Lease,
    companion: Companion,
    signals: Signals,
    spares: dict[str, int],
) -> list[Listener]:
    """Build the listeners; every rank calls it, once the state of `start` has been loaded.

    whole: the configuration of the whole run.
    """
    config, number = data_stage.config, data_stage.number
    train_data, heldout_data = data.train[number], data.heldout[number]
    faults = [Faults(train)] if config.guard.inject_fault else []
    saver = Saver(train, train_data.tokenizer_path, lease)
    lease.check()  # loading may have taken hours; from here on metrics are written
    stop = StopRequests(config, signals)
    metrics = Metrics(whole, data_stage, mesh, start, train_data.vocab_size)
    companion.follow(metrics)
    watchdog = Watchdog(config)
    # torch.compile leaves no product to time
    looks = config.guard.slow_ranks != "none" and not config.train.compile
    slow_ranks = [SlowRanks(config, mesh, train, metrics, stop)] if looks else []
    examination = Examination(config, train, metrics, watchdog) if config.guard.examine else None
    unigram = train_data.unigram_nats_per_token
    return [
        StartTimes(),
        CompanionListener(companion),
        *faults,
        StepProfile(config, mesh, watchdog),
        StepTrace(data_stage, mesh, start.step),
        metrics,  # measures the step, before the listeners below take time
        *slow_ranks,
        watchdog,
        MemoryReports(train, start.step),
        Evaluation(heldout_data, unigram, metrics, watchdog, stop),
        Tasks(config, train_data.tokenizer_path, metrics, watchdog, stop),
        LeaseCheck(lease),  # a displaced run ends here and writes nothing below
        RecordWriter(metrics),
        *([examination] if examination else []),  # may compute the step again
        SparesEvent(spares),
        stop,  # from here on, all ranks agree on stop and save requests
        # before Saving: a run that rolls back does not save
        Rollback(whole, data.train, start, lease, saver, metrics, watchdog),
        Saving(whole, saver, data.train, metrics, watchdog, stop, examination),
        DataStageBegins(whole),
        GarbageCollection(),  # last: freezes what all the others have built
    ]
