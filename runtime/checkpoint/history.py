"""Check that a checkpoint's run had the data stages of the configuration, as far as it came, and
find the state from which the run goes on.

    data_stages     0 ───────────────────┤ 1 ───────────────────┤ 2 ──────────────
    checkpoint      what it ended with   │ seq_len, data, model │ not reached: may be edited freely
                                 step 9000, "earlier"    step 12000: "seq_len", "data", …

A checkpoint saved at a boundary ends one data stage and starts the next.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from data.dataset import Mixture
from data.loader import Earlier, check_state
from declare import keys_of
from errors import UserError
from runtime.trainer_state import DataState, EarlierDataStage, TrainerState, model_entries
from settings.config import Config
from settings.data_stages import (
    ROTATION_KEYS,
    DataStage,
    data_stage_of,
    data_stages,
    in_data_stage,
    tokens_after,
)

FROM_WEIGHTS = "start a new run from its weights: checkpoint.load_weights_only, in another run.dir"
ORDER = ", which determines the order of samples"
AS_DATA_STAGE = "declare the change as a data stage from the checkpoint's step on (`data_stages`)"


def check_history(
    path: Path, trainer: TrainerState, config: Config, data: Sequence[Mixture]
) -> None:
    """Raise UserError if the run that saved the checkpoint `path` had other data stages up to its
    last step, or another model, optimizer or seed. `data`: the training data of each."""
    stages = data_stages(config)
    last = data_stage_of(stages, max(0, trainer.step - 1))  # that of its last step
    _require_same(path, "optimizer.name", trainer.optimizer, config.optimizer.name, FROM_WEIGHTS)
    _require_same(path, "train.seed", trainer.seed, config.train.seed, FROM_WEIGHTS, why=ORDER)
    had = [*trainer.earlier, end_of(trainer)][: last.number + 1]
    for was, stage, read in zip(had, stages, data, strict=False):
        seq_len, remedies = stage.config.train.seq_len, (AS_DATA_STAGE, FROM_WEIGHTS)
        with in_data_stage(stage.number):
            _require_same(path, "train.seq_len", was.seq_len, seq_len, *remedies, why=ORDER)
            check_state(was.data.model_dump(), read)
    with in_data_stage(last.number):
        check_model(path, trainer, last.config)
    ends = [one.steps.stop for one in stages[: last.number]]
    saved = [stage.step for stage in trainer.earlier]
    if saved != ends:
        why = f"a data stage ends after each of these steps, but up to step {trainer.step} the run "
        why += f"of the checkpoint {path} had {saved}"
        remedy = "leave data stages as they were up to the checkpoint's step; later ones may change"
        raise UserError("data_stages", ends, why, remedy)
    _check_tokens(path, trainer, config, stages)


def _check_tokens(
    path: Path, trainer: TrainerState, config: Config, stages: Sequence[DataStage]
) -> None:
    """Raise UserError if a data stage ahead begins at a token, and the run had another batch size:
    its first step would be counted wrongly."""
    counted = tokens_after(stages, trainer.step)
    for number, entry in enumerate(config.data_stages, 1):
        is_ahead = stages[number].steps.start >= trainer.step  # or begins here
        if is_ahead and "from_token" in entry and counted != trainer.tokens:
            why = f"the checkpoint {path} had {trainer.tokens:,} tokens after step {trainer.step}, "
            why += f"but with this train.global_batch_size it would be {counted:,}"
            remedy = f"declare the change as a data stage from step {trainer.step} on, with the "
            remedy += "earlier value before it; or give from_step"
            raise UserError(f"data_stages.{number}.from_token", entry["from_token"], why, remedy)


def check_model(
    path: Path, trainer: TrainerState, config: Config, free: Collection[str] = ()
) -> None:
    """Raise UserError if the checkpoint has another model, except for the keys that it does not
    store and those in `free`."""
    # A field that did not exist when the checkpoint was written has its default value.
    saved = {name: value for name, value, _ in keys_of(trainer.model_config_saved)}
    for name, value, is_free in keys_of(config.model):
        key = name.removeprefix("model.")
        if not is_free and key not in free:
            remedies = ["another checkpoint or run.dir"]
            if key in ROTATION_KEYS:
                remedies += [AS_DATA_STAGE, FROM_WEIGHTS]
            _require_same(path, name, saved.get(name), value, *remedies)


def _require_same(path: Path, key: str, was: Any, now: Any, *remedies: str, why: str = "") -> None:
    """Raise UserError if the checkpoint has another value of a key."""
    if was != now:
        remedy = ", or ".join(["use the checkpoint's value", *remedies])
        raise UserError(key, now, f"the checkpoint {path} has {key}={was!r}{why}", remedy)


def end_of(trainer: TrainerState) -> EarlierDataStage:
    """What the run has done in the data stage that ends with this checkpoint."""
    return EarlierDataStage(step=trainer.step, seq_len=trainer.seq_len, data=trainer.data)


def beginning(data: Mixture) -> DataState:
    """The state of a loader that has read nothing of `data`."""
    return DataState(checksum=data.checksum, next_sample=0, skipped=[])


def at_boundary(trainer: TrainerState, config: Config, data: Sequence[Mixture]) -> TrainerState:
    """Return the state from which the run goes on: that of the checkpoint, or at the end of a data
    stage that of the next one's beginning."""
    stages = data_stages(config)
    stage, before = (
        data_stage_of(stages, step) for step in (trainer.step, max(0, trainer.step - 1))
    )
    if stage is before:
        return trainer
    changed = {
        "seq_len": stage.config.train.seq_len,
        "model": model_entries(stage.config.model),
        "data": beginning(data[stage.number]),
        "earlier": [*trainer.earlier, end_of(trainer)],
        "bad_in_a_row": 0,  # counted within a data stage, because a rollback never leaves it
    }
    was, now = ((c.train.seq_len, c.data, c.model) for c in (before.config, stage.config))
    if was != now:  # the loss may have another level: the guard against spikes begins anew
        changed["recent_losses"] = []
    return trainer.model_copy(update=changed)


def passed(earlier: Sequence[EarlierDataStage], data: Sequence[Mixture]) -> list[Earlier]:
    """What the earlier data stages of a run have read, for the loader."""
    return [
        Earlier(of_stage, stage.seq_len, stage.data.next_sample)
        for of_stage, stage in zip(data, earlier, strict=False)
    ]
