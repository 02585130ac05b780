"""Weights & Biases as a tracker: one wandb run for all starts of a run, with its checkpoints."""

import contextlib
import json
import secrets
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from runtime.files import write_or_warn
from runtime.log.log_lines import is_count, json_object
from runtime.metrics.tracker import Record, Tracker, scalars
from runtime.output import log
from settings.config import Config
from settings.load import settings_of

START_SECONDS = 30.0  # for wandb's server to respond; all ranks wait meanwhile
# for wandb's last uploads: a server that does not respond must not keep a job from being requeued
FINISH_SECONDS = 60.0


class WandB(Tracker):
    """Logs to one wandb run for all starts, whose id is kept in RUN/wandb-run.json. A run that
    begins anew gets a new id.

    wandb accepts only increasing steps, but after a failure or a rollback a run makes some steps
    again. So the step sent to wandb is our step plus `repeated`, the number of steps lost so far.
    The axis of every plot is our own step; repeated steps show as a second line, and none is
    missing. The step counts of an offline run's folders do not overlap, so that
    `wandb sync RUN/wandb/offline-run-*` merges them into one run.

    Checkpoints become artifacts that refer to their folders; nothing of them is read or sent.

    Args:
        step: the step from which this start begins.
        system: the result of `describe_system` (metrics.py).
        anew: the folder's earlier run, if any, is another one.
        reached: the last step that was logged before this start.
    """

    name = "wandb"

    def __init__(
        self, config: Config, step: int, system: dict[str, Any], anew: bool, reached: int
    ) -> None:
        import wandb  # only if configured: the import takes a second

        self.wandb, self.folder = wandb, Path(config.run.dir).absolute()
        path = self.folder / "wandb-run.json"
        known = {} if anew or not path.exists() else json_object(path.read_bytes())
        self.id = str(known.get("id") or secrets.token_hex(4))
        repeated: Any = known.get("repeated")
        self.repeated: int = repeated if is_count(repeated) else 0
        self.went_back(step, reached)
        self.start, self.restarted = partial(self._start, config, system), False
        self.run = self.start()

    def _start(self, config: Config, system: dict[str, Any]) -> Any:
        init = partial(
            self.wandb.init,
            project=config.run.wandb_project,
            name=self.folder.name,
            id=self.id,
            resume="allow",
            dir=str(self.folder),
            config={**settings_of(config), "system": system},
            allow_val_change=True,
            settings=self.wandb.Settings(
                silent=True,
                reinit="create_new",
                init_timeout=START_SECONDS,
                finish_timeout=FINISH_SECONDS,
                x_transaction_log_flush_interval=1.0,
            ),
        )
        try:
            run = init(mode=config.run.wandb)
        except self.wandb.Error as error:  # no key, a wrong one, no network
            if config.run.wandb == "offline":
                raise
            self.wandb.teardown()  # else its process holds this id, and refuses it a second time
            run = init(mode="offline")
            folders = shlex.quote(str(self.folder / "wandb")) + "/offline-run-*"
            log(f"warning: wandb cannot go online; to upload later: wandb sync {folders} ({error})")
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def log(self, record: Record) -> None:
        known = scalars(record)
        step = record["step"] + self.repeated
        try:
            self.run.log(known, step=step, commit=True)  # commit: without waiting for the next step
        # wandb's process is gone: stopping a job signals all of its processes
        except ConnectionError:
            if self.restarted:
                raise  # restart only once: it takes time, and the other ranks wait
            self.restarted = True
            with contextlib.suppress(Exception):
                self.wandb.teardown()
            self.run = self.start()
            self.run.log(known, step=step, commit=True)

    def went_back(self, step: int, reached: int) -> None:
        self.repeated += reached - step
        # if it cannot be written, the next start may not continue this wandb run
        about = {"id": self.id, "repeated": self.repeated}
        write_or_warn(self.folder / "wandb-run.json", json.dumps(about) + "\n")

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))

    def committed(self, event: dict[str, Any]) -> None:
        path = self.folder / "checkpoints" / f"step-{event['step']:08d}"
        if path.is_dir():
            about = {name: event[name] for name in ("step", "bytes", "write_seconds")}
            artifact = self.wandb.Artifact(
                f"checkpoint-{self.id}", type="checkpoint", metadata=about
            )
            # a checksum would read the whole checkpoint
            artifact.add_reference(path.as_uri(), checksum=False)
            self.run.log_artifact(artifact, aliases=["latest", path.name])
