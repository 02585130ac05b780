"""Check that a checkpoint's run had the stages of the configuration, as far as it came.

    configuration   stage 0 ─────────────┤ stage 1 ─────────────┤ stage 2 ────────
    checkpoint      what it ended with   │ seq_len, data, model │ not reached: may be edited freely
                                 step 9000, "earlier"    step 12000: "seq_len", "data", …

A checkpoint saved at a boundary ends one stage and starts the next.
"""

import dataclasses
from collections.abc import Sequence, Set
from pathlib import Path

from data.dataset import Mixture
from data.earlier import Earlier
from data.loader import check_state
from errors import UserError
from runtime.trainer_state import FREE_MODEL_KEYS, EarlierStage, TrainerState
from settings.config import Config
from settings.data_stages import ROTATION_KEYS, in_stage

FROM_WEIGHTS = "start a new run from its weights: checkpoint.load_weights_only"
AS_STAGE = "declare the change as a stage from the checkpoint's step on (`stages`)"


def check_history(
    path: Path, trainer: TrainerState, config: Config, data: Sequence[Mixture]
) -> None:
    """Raise UserError if the run that saved the checkpoint `path` had other stages up to its last
    step, or another model, optimizer or seed. `data`: the training data of each stage."""
    number = config.stage_of(max(0, trainer.step - 1))  # the stage of its last step
    if trainer.optimizer != config.optimizer.name:
        why = f"the checkpoint {path} has the state of optimizer.name={trainer.optimizer}"
        remedy = f"use the checkpoint's value, or {FROM_WEIGHTS}"
        raise UserError("optimizer.name", config.optimizer.name, why, remedy)
    if trainer.seed != config.train.seed:
        why = f"the checkpoint {path} was saved with train.seed={trainer.seed}, which determines "
        why += "the order of samples"
        remedy = f"use the checkpoint's value, or {FROM_WEIGHTS}"
        raise UserError("train.seed", config.train.seed, why, remedy)
    had = [*trainer.earlier, end_of(trainer)][: number + 1]
    for stage, was in enumerate(had):
        seq_len = config.at_stage(stage).train.seq_len
        with in_stage(stage):
            if was.seq_len != seq_len:
                why = f"the checkpoint {path} was saved with train.seq_len={was.seq_len}, which "
                why += "determines the order of samples"
                remedy = f"use the checkpoint's value, {AS_STAGE}, or {FROM_WEIGHTS}"
                raise UserError("train.seq_len", seq_len, why, remedy)
            check_state(was.data.model_dump(), data[stage])
    with in_stage(number):
        check_model(path, trainer, config.at_stage(number), FREE_MODEL_KEYS)
    ends = [one.steps.stop for one in config.each_stage[:number]]
    saved = [stage.step for stage in trainer.earlier]
    if saved != ends:
        changed = [n for n, (a, b) in enumerate(zip(saved, ends, strict=False), 1) if a != b]
        first = min([*changed, min(len(saved), len(ends)) + 1])
        why = f"the checkpoint {path} is at step {trainer.step}, and its run changed its stage "
        why += f"after {'the steps ' + str(saved) if saved else 'no step'}, not after {ends}"
        remedy = "leave stages as they were up to the checkpoint's step; later ones may change"
        raise UserError(f"stages.{first}", ends[first - 1 : first], why, remedy)
    _check_tokens(path, trainer, config)


def _check_tokens(path: Path, trainer: TrainerState, config: Config) -> None:
    """Raise UserError if a stage ahead begins at a token, and the run had another batch size: its
    first step would be counted wrongly."""
    counted = config.tokens_after(trainer.step)
    if counted == trainer.tokens:
        return
    now = config.stage_of(trainer.step)
    for number, later in enumerate(config.whole.stages, 1):
        name, token = later.begins
        if number <= now or name != "from_token":
            continue
        train = config.at_stage(now).train
        left = -(-(token - trainer.tokens) // (train.global_batch_size * train.seq_len))
        why = f"the checkpoint {path} had {trainer.tokens:,} tokens after step {trainer.step}, but "
        why += f"with this configuration it would be {counted:,}: train.global_batch_size changed"
        remedy = f"declare the change as a stage from step {trainer.step} on, with the earlier "
        remedy += "value before it"
        if number == now + 1 and left > 0:
            remedy += f"; or give from_step={trainer.step + left}"
        raise UserError(f"stages.{number}.{name}", token, why, remedy)


def check_model(path: Path, trainer: TrainerState, config: Config, free: Set[str]) -> None:
    """Raise UserError if the checkpoint has another model, except for the keys in `free`."""
    # A field that did not exist when the checkpoint was written has its default value.
    saved = dataclasses.asdict(trainer.model_config_saved)
    for name, value in dataclasses.asdict(config.model).items():
        if name not in free and saved.get(name) != value:
            why = f"the checkpoint {path} has model.{name}={saved.get(name)!r}"
            remedy = "use the checkpoint's value, or another checkpoint or run.dir"
            if name in ROTATION_KEYS:
                remedy += f", or {AS_STAGE}, or {FROM_WEIGHTS}"
            raise UserError(f"model.{name}", value, why, remedy)


def end_of(trainer: TrainerState) -> EarlierStage:
    """What the run has done in the stage that ends with this checkpoint."""
    return EarlierStage(step=trainer.step, seq_len=trainer.seq_len, data=trainer.data)


def changes_the_loss(before: Config, after: Config) -> bool:
    """Whether the loss may have another level in stage `after`, so that the guard against spikes
    must forget the losses of the stage before."""
    of_loss = ("data", "model")
    return before.train.seq_len != after.train.seq_len or any(
        getattr(before, name) != getattr(after, name) for name in of_loss
    )


def passed(earlier: Sequence[EarlierStage], data: Sequence[Mixture]) -> list[Earlier]:
    """What the earlier stages of a run have read, for the loader."""
    return [
        Earlier(of_stage, stage.seq_len, stage.data.next_sample)
        for of_stage, stage in zip(data, earlier, strict=False)
    ]
