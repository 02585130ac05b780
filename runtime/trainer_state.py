"""What a saved state of training is: the tensors of each rank, and the rest (trainer.json). And
where a run starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from costs.parameters import sum_over_weights
from declare import keys_of
from errors import UserError
from model.config import ModelConfig
from parallel.parameter import NamedWeight
from parallel.placement import dim_of
from runtime.schema import MAX_INT, Name, Natural, Strict
from settings.config import Config
from settings.moved import at_new_places
from training.optimizers import bytes_of_states, optimizer_class
from training.step import TrainStep

FILE = "trainer.json"
# what it has of a run that has made no step
BEGINNING: Any = {"step": 0, "updates": 0, "tokens": 0, "recent_losses": [], "bad_in_a_row": 0}
Positive = Annotated[int, Field(ge=1, le=MAX_INT)]


class DataState(Strict):
    """The state of the data loader (data/loader.py), of one data stage."""

    checksum: Name  # of the data
    next_sample: Natural
    skipped: list[tuple[Natural, Natural]]  # half-open ranges of samples that are never read

    @model_validator(mode="after")
    def _ranges_are_ascending(self) -> "DataState":
        if any(begin > end for begin, end in self.skipped):
            raise ValueError("a range of skipped samples ends before it begins")
        return self


class EarlierDataStage(Strict):
    """What a run with data stages has done in one that is over."""

    step: Natural  # its last
    seq_len: Positive
    data: DataState  # at its end


class TrainerState(Strict):
    """How far a run is. In a run with data stages, `seq_len` and `data` are those of one."""

    step: Natural  # steps done
    updates: Natural  # of the weights: fewer than steps if some were skipped
    tokens: Natural  # trained on
    seed: Annotated[int, Field(ge=-MAX_INT - 1, le=MAX_INT)]
    optimizer: Name = "adamw"  # older versions had only this one and did not record it
    seq_len: Positive
    # for the guard against loss spikes; None: the loss was not finite
    recent_losses: Annotated[list[float | None], Field(max_length=1000)]
    bad_in_a_row: Natural  # consecutive bad steps up to this one (training/guard.py)
    # with float16, how the loss is scaled: the scale, and consecutive steps with a finite norm
    loss_scale: tuple[Annotated[float, Field(ge=1)], Natural] | None = None
    model: dict[Name, Any]  # checked by ModelConfig; a mapping: the settings of a kind
    data: DataState
    # only of a run with data stages: those before that of `data`
    earlier: list[EarlierDataStage] = Field(default_factory=list, max_length=1000)
    # Older versions rolled back to earlier data stages, and recorded what later ones should not
    # read. It is accepted, and has no effect: `data` already skips what lies in its own.
    left_out: list[tuple[Natural, Natural, Natural]] = Field(default_factory=list, exclude=True)

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainerState":
        if max(self.updates, self.bad_in_a_row) > self.step:
            raise ValueError("it counts more updates, or more skipped updates, than steps")
        ends = [0, *(stage.step for stage in self.earlier)]
        if ends != sorted({*ends}) or ends[-1] > self.step:
            raise ValueError("its data stages are not in order")
        try:
            self.model_config_saved  # noqa: B018 - it raises
        except UserError as error:
            raise ValueError(f"{error.key} {error.why}") from None
        return self

    @property
    def model_config_saved(self) -> ModelConfig:
        """The saved model configuration. Raises UserError if it is invalid."""
        return ModelConfig(**at_new_places("model", self.model))


def state_of(config: Config, data: DataState, **progress: Any) -> TrainerState:
    """The state of a run of `config` (of one data stage), with fields of `progress`; by default of
    its beginning."""
    about: dict[str, Any] = {"seed": config.train.seed, "optimizer": config.optimizer.name}
    about |= {"seq_len": config.train.seq_len, "model": model_entries(config.model), "data": data}
    return TrainerState(**BEGINNING | progress, **about)


def model_entries(model: ModelConfig) -> dict[str, Any]:
    """Return the part of the model configuration that a checkpoint stores, as JSON has it."""
    found: dict[str, Any] = {}
    for name, value, is_free in keys_of(model):
        _, *kind, key = name.split(".")
        if not is_free:
            inner = found.setdefault(kind[0], {}) if kind else found
            inner[key] = list(value) if isinstance(value, tuple) else value
    return found


@dataclass(frozen=True)
class Start:
    """Where a run, or a data stage of it, begins: from initial weights, from only the weights of a
    checkpoint, or from the full state of a checkpoint."""

    state: TrainerState
    path: Path | None = None
    weights_only: bool = False

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def data_stage(self) -> int:
        """Its number."""
        return len(self.state.earlier)


@dataclass(frozen=True)
class Held:
    """A sharded tensor of this rank, which shares memory with the model or the optimizer."""

    name: str  # of the global tensor in a checkpoint
    tensor: DTensor
    of_model: bool  # a weight, or the bias of a router; else an optimizer state
    is_copy: bool  # a second copy of the same global tensor on this rank


def held_tensors(train: TrainStep) -> Iterator[Held]:
    """Yield every tensor of this rank that a checkpoint contains."""
    for weight in train.weights:
        yield Held(f"model.{weight.global_name}", weight.sharded, True, weight.is_copy)
    optimizer = train.optimizer
    for weight, states in zip(optimizer.weights, optimizer.states, strict=True):
        for key, state in optimizer.states_of(weight.spec).items():
            tensor = as_dimensions_of(states[key], weight.sharded, state.dims)
            yield Held(f"optimizer.{weight.global_name}.{key}", tensor, False, weight.is_copy)
    for name, bias in () if train.balance is None else train.balance.tensors():
        yield Held(f"model.{name}", bias, True, False)


def as_dimensions_of(local: Tensor, like: DTensor, dims: Sequence[int]) -> DTensor:
    """Wrap `local` as this rank's part of a global tensor that has only the dimensions `dims` of
    `like`, each sharded as there. Over an axis that shards another one it is replicated."""
    placements: list[Placement] = []
    for placement in like.placements:
        if placement.is_replicate() or dim_of(placement) not in dims:
            placements.append(Replicate())
        elif isinstance(placement, _StridedShard):
            factor = placement.split_factor
            placements.append(_StridedShard(dims.index(dim_of(placement)), split_factor=factor))
        else:
            placements.append(Shard(dims.index(dim_of(placement))))
    empty = torch.empty([like.shape[dim] for dim in dims], dtype=local.dtype, device="meta")
    meta = TensorMeta(empty.shape, empty.stride(), empty.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements), meta)
    return DTensor(local, spec, requires_grad=False)


def state_bytes(config: Config) -> int:
    """Bytes of the whole model between steps: the weights, and the optimizer's states."""
    states_of = optimizer_class(config.optimizer.name).states_of
    master = config.precision.master.itemsize

    def held(weight: NamedWeight) -> int:
        states = bytes_of_states(states_of(weight.spec), weight.spec.shape, master)
        return weight.numel * master + states

    return sum_over_weights(config.model, held)


def bytes_of_rank(config: Config, world: int) -> float:
    """The least that a rank holds of the weights and optimizer states."""
    sizes = config.parallel.mesh_sizes(world)
    # with zero_stage 0 cp's ranks hold copies, but of experts only those beside ep
    copies = min(sizes.of_weights["dp_replicate"], sizes.of_experts["ep_replicate"])
    return state_bytes(config) * copies / world
