"""Find the checkpoint that a run starts from, and load it. (save.py writes checkpoints.)

    checkpoints/step-00000100/  *.safetensors  model.NAME (weights, and the biases of routers) and
                                               optimizer.NAME.exp_avg[_sq]; each rank writes its
                                               shards
                                trainer.json   step, updates, tokens, state of the guard and of the
                                               data loader, dimensions of the model
                                tokenizer.model, or tokenizer.json and its companion files
                                manifest.json  everything above, with checksums (manifest.py)
    checkpoints/latest          the name of the newest

Tensors are stored under their global names and shapes, so any layout loads what any other saved.
Before a checkpoint is used, every file of it is read and its checksum compared; the files are
divided among the ranks. A damaged checkpoint is put aside, and with checkpoint.resume=auto the one
before it is used. Checkpoints that a rollback invalidates are put aside too (rollback.py). The
names are explained in run_folder.py. Nothing is pickled.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from data.dataset import Mixture
from data.earlier import Windows, samples_of
from errors import UserError
from runtime.checkpoint.history import changes_the_loss, check_history, check_model, end_of, passed
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    check_file,
    check_sizes,
    check_whole,
    read_manifest,
)
from runtime.checkpoint.names import complete_checkpoints, step_of
from runtime.checkpoint.progress import byte_bar
from runtime.checkpoint.run_folder import (
    checkpoint_folder,
    checkpoints_of,
    put_aside,
    put_incomplete_aside,
    refuse_to_begin_anew,
)
from runtime.checkpoint.tiling import Point, random_point
from runtime.checkpoint.trainer_state import (
    FREE_MODEL_KEYS,
    EarlierStage,
    TrainerState,
    parse_trainer,
    read_trainer,
)
from runtime.messages import from_rank_0, log, on_all_ranks
from runtime.start.parts import parts
from settings.config import Config
from settings.data_stages import ROTATION_KEYS
from training.step import TrainStep


@dataclass(frozen=True)
class Start:
    """Where a run begins: from initial weights, from only the weights of a checkpoint, or from the
    full state of a checkpoint."""

    path: Path | None = None
    weights_only: bool = False
    step: int = 0  # steps done
    updates: int = 0  # of the weights: `step` less the skipped updates
    tokens: int = 0  # trained on
    next_sample: int = 0
    skipped: tuple[tuple[int, int], ...] = ()  # half-open ranges of samples that are never read
    recent_losses: tuple[float | None, ...] = ()  # for the guard against loss spikes
    bad_in_a_row: int = 0  # consecutive steps up to this one whose updates were skipped
    # of a run with stages; `next_sample` and `skipped` count samples of this one
    stage: int = 0
    earlier: tuple[EarlierStage, ...] = ()
    left_out: tuple[Windows, ...] = ()  # by rollbacks to an earlier stage
    gone_back: tuple[int, ...] = ()  # the steps to which this process has rolled back


@parts(inside="verify")
def find_start(config: Config, data: Sequence[Mixture], lease: Lease) -> Start:
    """Return the start that `checkpoint.resume` and `checkpoint.load_weights_only` select, the same
    on every rank, checked against the configuration and the training data of each stage. A
    checkpoint to resume from takes precedence over one that only provides initial weights."""
    resume, device = config.checkpoint.resume, lease.device
    from_rank_0(lambda: put_incomplete_aside(lease), device)
    if resume == "auto":
        path = _newest_good(config, lease)
        if path is None:
            from_rank_0(lambda: refuse_to_begin_anew(config), device)
    else:
        path = _named(resume, "checkpoint.resume", device) if resume != "none" else None
        if path is not None:
            require_good(path, "checkpoint.resume", device)
    weights = config.checkpoint.load_weights_only
    first_weights = None
    if weights and path is None:
        first_weights = _named(weights, "checkpoint.load_weights_only", device)
    if first_weights is not None:
        require_good(first_weights, "checkpoint.load_weights_only", device)
    return from_rank_0(lambda: _start_from(path, first_weights, config, data), device)


def _named(folder: str, key: str, device: str) -> Path:
    """Return `folder` if it is a checkpoint, or the newest checkpoint of the run that it holds, as
    the tools do. Raises UserError, on every rank, if there is none."""

    def find() -> Path:
        try:
            return checkpoints_of(Path(folder), key)[-1]
        except OSError as error:
            remedy = "give a run folder or a folder step-… that can be read"
            raise UserError(key, folder, error.strerror or str(error), remedy) from None

    return from_rank_0(find, device)


def find_before(
    last_step: int, config: Config, data: Sequence[Mixture], begun: Start, lease: Lease
) -> Start:
    """Find the checkpoint that a running run goes back to: its newest good one from `last_step` or
    before, else the checkpoint that it was resumed from, if that is as early. If one is found,
    later checkpoints are put aside; if none is, an empty Start is returned."""
    device = lease.device
    path = _newest_good(config, lease, last_step)
    if path is None and not begun.weights_only and begun.step <= last_step:
        path = from_rank_0(
            lambda: begun.path if begun.path and (begun.path / MANIFEST).exists() else None, device
        )
    if path is None:
        return Start()

    def abandon() -> None:
        for later in reversed(complete_checkpoints(checkpoint_folder(config))):
            if step_of(later) > last_step:
                log(
                    f"warning: {put_aside(lease, later, '.abandoned')} was saved after the "
                    "rollback point and is not used again"
                )

    from_rank_0(abandon, device)
    return from_rank_0(lambda: _start_from(path, None, config, data), device)


def _start_from(
    path: Path | None, first_weights: Path | None, config: Config, data: Sequence[Mixture]
) -> Start:
    """Read and check a start on rank 0, from a good checkpoint: `path`, or only its weights."""
    start = Start()
    if path is not None:
        trainer = read_trainer(path, "checkpoint.resume")
        check_history(path, trainer, config, data)
        if trainer.step > config.train.steps:
            why = f"the checkpoint {path} is already at step {trainer.step}"
            remedy = f"give {trainer.step} or more, or another run.dir"
            raise UserError("train.steps", config.train.steps, why, remedy)
        start = _resume(path, trainer, config, data)
    later = [c for c in complete_checkpoints(checkpoint_folder(config)) if step_of(c) > start.step]
    if later:
        why = (
            f"it holds {later[-1].name}, which this run would not start from "
            "and would eventually delete"
        )
        remedy = "choose another run.dir, or checkpoint.resume=auto"
        raise UserError("run.dir", config.run.dir, why, remedy)
    if path is None and first_weights is not None:
        trainer = read_trainer(first_weights, "checkpoint.load_weights_only")
        check_model(first_weights, trainer, config, FREE_MODEL_KEYS | ROTATION_KEYS)
        return Start(first_weights, weights_only=True)
    return start


def _resume(path: Path, trainer: TrainerState, config: Config, data: Sequence[Mixture]) -> Start:
    """Return the start from a checkpoint, at a boundary that of the next stage."""
    stage, before = config.stage_of(trainer.step), config.stage_of(max(0, trainer.step - 1))
    start = Start(
        path,
        step=trainer.step,
        updates=trainer.updates,
        tokens=trainer.tokens,
        next_sample=trainer.data.next_sample,
        skipped=tuple(trainer.data.skipped),
        recent_losses=tuple(trainer.recent_losses),
        bad_in_a_row=trainer.bad_in_a_row,
        stage=stage,
        earlier=tuple(trainer.earlier),
        left_out=tuple(trainer.left_out),
    )
    if stage == before:
        return start
    anew = changes_the_loss(config.at_stage(before), config.at_stage(stage))
    earlier, seq_len = (*start.earlier, end_of(trainer)), config.at_stage(stage).train.seq_len
    return replace(
        start,
        next_sample=0,
        skipped=samples_of(data[stage], seq_len, passed(earlier, data), start.left_out),
        recent_losses=() if anew else start.recent_losses,
        earlier=earlier,
    )


def _newest_good(config: Config, lease: Lease, last_step: float = math.inf) -> Path | None:
    """Return the newest undamaged checkpoint of the run folder up to `last_step`. Damaged ones are
    put aside with a warning."""
    folder = checkpoint_folder(config)
    for path in reversed(from_rank_0(lambda: complete_checkpoints(folder), lease.device)):
        if step_of(path) > last_step:
            continue
        problem = _damage(path)
        if problem is None:
            return path
        if dist.get_rank() == 0:
            log(f"warning: {path} is damaged: {problem}. It is put aside and not used")
            put_aside(lease, path, ".damaged")
        dist.barrier()
    return None


def require_good(path: Path, key: str, device: str) -> None:
    """Raise UserError, on every rank, if the checkpoint that `key` selects is damaged."""
    problem = _damage(path)

    def refuse() -> None:
        if problem is not None:
            why = f"is not a valid checkpoint: {problem}"
            raise UserError(key, str(path), why, "give another folder step-…")

    from_rank_0(refuse, device)


def _damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if it is undamaged; the same on every rank.
    Each rank reads its share of the files."""
    rank, world = dist.get_rank(), dist.get_world_size()
    read: list[tuple[Manifest, Point] | str] = [""]
    if rank == 0:
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
            parse_trainer(path)
            read = [(manifest, random_point())]
        except Damaged as damaged:
            read = [str(damaged)]
    dist.broadcast_object_list(read, src=0)
    if isinstance(read[0], str):
        return read[0]
    manifest, point = read[0]
    covered: Counter[str] = Counter()
    problem = None
    mine = sorted(manifest.files)[rank::world]
    try:
        with byte_bar(
            f"checking {path.name}", sum(manifest.files[name][0] for name in mine), shown=rank == 0
        ) as bar:
            for name in mine:
                covered += check_file(path, manifest, name, point, bar.update)
    except Damaged as damaged:
        problem = str(damaged)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (covered, problem))
    for _, theirs in everyone:
        if theirs is not None:
            return str(theirs)
    try:
        check_whole(manifest, sum((theirs for theirs, _ in everyone), Counter()), point)
    except Damaged as damaged:
        return str(damaged)
    return None


@parts(before="build", inside="load")
def load(train: TrainStep, start: Start) -> None:
    """Load this rank's part of the model, moments and update count, or only of the model, from a
    checkpoint of any layout."""
    path = start.path
    if path is None:
        return
    wanted: dict[str, DTensor] = {}
    second_copies = []  # a tied weight that this rank holds twice is read only once
    for held in held_tensors(train):
        if start.weights_only and not held.of_model:
            continue
        if held.name in wanted:
            second_copies.append((wanted[held.name], held.tensor))
        wanted.setdefault(held.name, held.tensor)

    size = sum(tensor.to_local().nbytes for tensor in wanted.values())

    def read() -> None:
        try:
            with byte_bar(f"loading {path.name}", size, shown=dist.get_rank() == 0) as bar:
                reader = HuggingFaceStorageReader(str(path))
                dcp.load(wanted, storage_reader=reader, planner=_ShownPlanner(bar))
        except dcp.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            why = f"cannot be read: {first}"
            raise UserError("checkpoint", str(path), why, "choose another checkpoint") from None

    on_all_ranks(read, train.mesh.device)
    for source, copy in second_copies:
        copy.copy_(source)
    if not start.weights_only:
        train.optimizer.set_updates(start.updates)
        train.guard.restore(start.recent_losses, start.bad_in_a_row)


class _ShownPlanner(DefaultLoadPlanner):
    """DCP's default planner, which also advances a progress bar for each piece that is read."""

    def __init__(self, bar: "tqdm[None]") -> None:
        super().__init__()
        self.bar = bar

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self.bar.update(tensor.nbytes)


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
    for weight, key, state in train.optimizer.state_tensors():
        yield Held(f"optimizer.{weight.global_name}.{key}", state, False, weight.is_copy)
    for name, bias in () if train.balance is None else train.balance.tensors():
        yield Held(f"model.{name}", bias, True, False)
