"""trainer.json: the state of training in a checkpoint, other than tensors."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from errors import UserError
from model.config import ModelConfig
from runtime.checkpoint.manifest import Damaged, Manifest, check_sizes, read_manifest, verify
from runtime.checkpoint.names import NAME, step_of
from runtime.schema import MAX_INT, Count, Name, Strict, first_problem, load_json

FILE = "trainer.json"
MAX_DIMENSION = 10**8  # of a model
MOST_LEFT_OUT = 10**7  # samples that are listed one by one, when a data stage begins
# Not stored: initialization, losses, how biases change, and kernels do not decide whether weights
# fit a model.
FREE_MODEL_KEYS = {
    "init_std", "z_loss", "router_aux_weight", "router_z_weight", "router_bias_rate", "kernels",
    "attention_kernel",
}  # fmt: skip

Dimension = Annotated[int, Field(le=MAX_DIMENSION)]


class DataState(Strict):
    """The state of the data loader (data/loader.py), of one data stage."""

    checksum: Name  # of the data
    next_sample: Count
    skipped: list[tuple[Count, Count]]  # half-open ranges of samples that are never read


class EarlierDataStage(Strict):
    """What a run with data stages has done in one that is over."""

    step: Count  # its last
    seq_len: Annotated[int, Field(ge=1, le=MAX_INT)]
    data: DataState  # at its end


class TrainerState(Strict):
    step: Count  # steps done
    updates: Count  # of the weights: fewer than steps if some were skipped
    tokens: Count
    seed: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
    seq_len: Annotated[int, Field(ge=1, le=MAX_INT)]
    # for the guard; None: the loss was not finite
    recent_losses: Annotated[list[float | None], Field(max_length=1000)]
    bad_in_a_row: Count
    optimizer: Name = "adamw"  # older versions had only this one and did not record it
    # a list: kinds of layers, repeated in turn
    model: dict[Name, bool | Dimension | float | str | list[Name] | None]
    data: DataState
    # only of a run with data stages: those before that of `step`
    earlier: list[EarlierDataStage] = Field(default_factory=list, max_length=1000)
    # left out by rollbacks to an earlier data stage: a source's number in the run, and a range of
    # its samples (data/earlier.py)
    left_out: list[tuple[Count, Count, Count]] = Field(default_factory=list)

    @property
    def model_config_saved(self) -> ModelConfig:
        """The saved model configuration. Raises UserError or ValidationError if it is invalid."""
        return TypeAdapter(ModelConfig).validate_json(json.dumps(self.model), strict=True)


def read_trainer(path: Path, key: str) -> TrainerState:
    """Read a checkpoint's trainer.json after checking the sizes of all its files. `key` is the
    configuration key or option that selected the checkpoint, for the message.

    Raises UserError.
    """
    try:
        check_sizes(path, read_manifest(path))
        return parse_trainer(path)
    except Damaged as damaged:
        why = f"is not a valid checkpoint: {damaged}"
        raise UserError(key, str(path), why, "give another folder step-…") from None


def parse_trainer(path: Path) -> TrainerState:
    """Read and validate trainer.json. Raises Damaged."""
    try:
        content: Any = load_json((path / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise Damaged(f"its {FILE} is missing or unreadable") from None
    problem = None
    try:
        trainer = TrainerState.model_validate_json(json.dumps(content))
        trainer.model_config_saved  # noqa: B018 - it raises
    except ValidationError as error:
        problem = first_problem(error)
    except UserError as error:
        problem = f"{error.key} {error.why}"
    else:
        if trainer.updates > trainer.step or trainer.bad_in_a_row > trainer.step:
            problem = "it counts more updates, or more skipped updates, than steps"
        elif any(
            begin > end
            for begin, end in [
                *trainer.data.skipped,
                *(pair for stage in trainer.earlier for pair in stage.data.skipped),
                *(pair for _, *pair in trainer.left_out),
            ]
        ):
            problem = "a range of skipped samples ends before it begins"
        elif sum(end - begin for _, begin, end in trainer.left_out) > MOST_LEFT_OUT:
            problem = f"it leaves out more than {MOST_LEFT_OUT:,} samples"
        elif (ends := [0, *(stage.step for stage in trainer.earlier), trainer.step]) != sorted(
            set(ends)
        ) and trainer.earlier:
            problem = "its data stages are not in order"
        elif NAME.fullmatch(path.name) and step_of(path) != trainer.step:
            problem = (
                f"it was saved after {trainer.step} steps, but its folder name says {step_of(path)}"
            )
        else:
            return trainer
    raise Damaged(f"its {FILE} has invalid content ({problem})")


def verify_checkpoint(path: Path) -> Manifest:
    """Run every check that a start makes before it uses a checkpoint, in one process. Raises
    Damaged."""
    manifest = verify(path)
    parse_trainer(path)
    return manifest


def model_entries(model: ModelConfig) -> dict[str, Any]:
    """Return the part of the model configuration that a checkpoint stores."""
    return {
        key: value for key, value in dataclasses.asdict(model).items() if key not in FREE_MODEL_KEYS
    }
