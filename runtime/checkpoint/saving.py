"""Decides when a run saves, and checks its state first. (save.py does the saving.)"""

import time
from collections.abc import Sequence

from data.dataset import Mixture
from errors import RunFailed
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.load import find_before
from runtime.checkpoint.save import Saver
from runtime.checkpoint.save_interval import SaveInterval
from runtime.health.examine import Examination
from runtime.health.replicas import ReplicasDiffer, check_replicas
from runtime.listener import Listener, Run
from runtime.trainer_state import DataState, Start
from settings.config import Config


class Saving(Listener):
    """Saves every checkpoint.interval steps and after the last step, unless that is `never`; and at
    the end of a data stage and on request.

    While updates are being skipped, a save that is due waits until steps are good again, because an
    update before the bad steps may have ruined the weights. A save on request or after the last
    step does not wait.

    Args:
        config: of the whole run.
        data: the training data of each data stage.
    """

    def __init__(
        self,
        config: Config,
        data: Sequence[Mixture],
        saver: Saver,
        examination: Examination | None,
    ) -> None:
        self.config, self.data, self.saver = config, data, saver
        self.examination = examination
        self.is_due = False  # stays set while steps are bad

    def begins(self, run: Run) -> None:
        self.interval = SaveInterval(run.config, run.step, self.saver.local_bytes)

    def after_step(self, run: Run) -> None:
        config, stop = run.config, run.stop
        self.is_due |= self.interval.is_due(run) or run.changes_data_stage
        if not (self.is_due or stop.wants_save or run.is_due(config.guard.replica_interval)):
            return
        good = not run.train.guard.bad_in_a_row or run.is_last
        saves = stop.wants_save or (self.is_due and good)
        with run.pause("saving" if saves else "examination"):
            began = time.perf_counter()
            self._check_replicas(run)
            if saves:
                state = DataState.model_validate(run.loader.state(), strict=False)
                self.saver.save(run.step, run.tokens, state, run.start.state.earlier)
                self.is_due = False
                self.interval.saved(run, time.perf_counter() - began, self.saver.last)
                stop.done("SAVE")
                if stop.agree():  # includes requests that arrived during the save
                    run.end(stop.reason)

    def _check_replicas(self, run: Run) -> None:
        try:
            check_replicas(run.train)
        except ReplicasDiffer as found:
            if self.examination is None:
                raise
            raise self.examination.of_replicas(run, found) from None

    def went_back(self, run: Run, start: Start) -> None:
        self.is_due = False
        self.interval.saved_at = start.step

    def ends(self, run: Run) -> None:
        with run.pause("end"):
            self.saver.close()
            if run.changes_data_stage:
                # Usually the checkpoint that was just saved; an earlier one if that is damaged.
                lease = self.saver.lease
                run.following = find_before(run.step, self.config, self.data, run.start, lease)
                if run.following is None:
                    why = f"data stage {run.data_stage.number} has ended, its checkpoint is "
                    raise RunFailed(f"{why}damaged, and there is no good one before it")

    def closes(self, run: Run, error: BaseException | None) -> None:
        if isinstance(error, RunFailed):  # raised on all ranks: finish the save in progress
            with run.watchdog.resting():
                self.saver.wait()


class LeaseCheck(Listener):
    """Ends a run that was displaced."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def after_step(self, run: Run) -> None:
        self.lease.check()

    def ends(self, run: Run) -> None:
        self.lease.check()
