"""trainer.json: how far training had come when a checkpoint was saved, and what of."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from errors import UserError
from model.config import ModelConfig
from runtime.manifest import Damaged, Manifest, check_sizes, read_manifest, verify
from runtime.run_folder import NAME, step_of
from runtime.schema import MAX_INT, Count, Name, Strict, first_problem, load_json

FILE = "trainer.json"
MAX_DIMENSION = 10**8  # of a model
# Only dimensions decide whether weights fit; how they began, loss and kernels do not.
FREE_MODEL_KEYS = {"init_std", "z_loss", "kernels"}

Dimension = Annotated[int, Field(le=MAX_DIMENSION)]


class DataState(Strict):
    """Of the loader (data/loader.py)."""

    checksum: Name  # of the data
    next_sample: Count
    skipped: list[tuple[Count, Count]]  # half-open ranges of samples that are never read


class TrainerState(Strict):
    step: Count  # steps made
    updates: Count  # of the weights: fewer where some were skipped
    tokens: Count
    seed: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
    seq_len: Annotated[int, Field(ge=1, le=MAX_INT)]
    # for the guard; None: it was not finite
    recent_losses: Annotated[list[float | None], Field(max_length=1000)]
    bad_in_a_row: Count
    optimizer: Name = "adamw"  # older versions had no other, and did not say so
    model: dict[Name, bool | Dimension | float | str | list[Name] | None]  # a list: kinds in turn
    data: DataState

    @property
    def model_config_saved(self) -> ModelConfig:
        """Raises UserError or ValidationError where it is no model's."""
        return TypeAdapter(ModelConfig).validate_json(json.dumps(self.model), strict=True)


def read_trainer(path: Path, key: str) -> TrainerState:
    """A checkpoint's trainer.json, once its files have the sizes that they should. `key`, for the
    message, chose it.

    Raises UserError.
    """
    try:
        check_sizes(path, read_manifest(path))
        return parse_trainer(path)
    except Damaged as damaged:
        why = f"is no good checkpoint: {damaged}"
        raise UserError(key, str(path), why, "give another folder step-…") from None


def parse_trainer(path: Path) -> TrainerState:
    """Raises Damaged."""
    try:
        content: Any = load_json((path / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise Damaged(f"it has no readable {FILE}") from None
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
            problem = "it counts more updates, or more skipped ones, than steps"
        elif any(begin > end for begin, end in trainer.data.skipped):
            problem = "a range of skipped samples ends before it begins"
        elif NAME.fullmatch(path.name) and step_of(path) != trainer.step:
            problem = (
                f"it was saved after {trainer.step} steps, and its folder says {step_of(path)}"
            )
        else:
            return trainer
    raise Damaged(f"its {FILE} does not say what it should ({problem})")


def verify_checkpoint(path: Path) -> Manifest:
    """Everything that a start checks before it uses a checkpoint, in one process; else Damaged."""
    manifest = verify(path)
    parse_trainer(path)
    return manifest


def model_entries(model: ModelConfig) -> dict[str, Any]:
    """What a checkpoint keeps of the model's configuration."""
    return {
        key: value for key, value in dataclasses.asdict(model).items() if key not in FREE_MODEL_KEYS
    }
