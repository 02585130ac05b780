"""Find the checkpoint that a run starts from, and load it. (save.py writes checkpoints.)

    *.safetensors  model.NAME (weights, and the biases of routers) and optimizer.NAME.exp_avg[_sq];
                   each rank writes its shards
    trainer.json   what else a run continues from (trainer_state.py)
    tokenizer.model, or tokenizer.json and its companion files
    manifest.json  everything above, with checksums (manifest.py)

Tensors are stored under their global names and shapes, so any layout loads what any other saved.
Before a checkpoint is used, every file of it is read and its checksum compared; the files are
divided among the ranks. A damaged checkpoint is put aside, and with checkpoint.resume=auto the one
before it is used. Checkpoints that a rollback invalidates are put aside too (rollback.py). The
names of folders are explained in folder.py. Nothing is pickled.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from data.dataset import Mixture
from data.tokenizer import Tokenizer
from errors import UserError, is_file
from runtime.agreement import AgreedError, from_rank_0, on_all_ranks
from runtime.checkpoint.folder import (
    ABANDONED,
    DAMAGED,
    MANIFEST,
    checkpoints_of,
    complete_checkpoints,
    named_checkpoints,
    step_of,
)
from runtime.checkpoint.history import at_boundary, beginning, check_history, check_model
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.manifest import Damaged
from runtime.checkpoint.placed import Placed
from runtime.checkpoint.verify import check_files, check_whole, described, parse_trainer
from runtime.log.events import read_events
from runtime.output import log
from runtime.trainer_state import Start, held_tensors, state_of
from settings.config import Config
from settings.data_stages import ROTATION_KEYS
from training.step import TrainStep


def find_start(config: Config, data: Sequence[Mixture], lease: Lease) -> Start:
    """Return the start that `checkpoint.resume` and `checkpoint.load_weights_only` select, the same
    on every rank, checked against the configuration and the training data of each data stage. A
    checkpoint to resume from takes precedence over one that only provides initial weights."""
    resume = config.checkpoint.resume
    from_rank_0(lambda: _put_incomplete_aside(lease))
    path = None
    begun, has_saved = from_rank_0(lambda: _began_at(resume, lease))
    if begun < math.inf:
        path = _newest_good(lease)
        # without a save since then, damaged ones are those of a run before, as a good one may be
        if has_saved and (path is None or step_of(path) <= begun):
            from_rank_0(lambda: _refuse_to_begin_anew(resume, lease))
    if resume not in ("auto", "none") and (path is None or step_of(path) <= begun):
        path = _named(resume, "checkpoint.resume")
    start = from_rank_0(lambda: _start_from(path, config, data, lease))
    if path is None and config.checkpoint.load_weights_only:
        key = "checkpoint.load_weights_only"
        weights = _named(config.checkpoint.load_weights_only, key)
        from_rank_0(lambda: _check_weights(weights, config, data[0]))
        return replace(start, path=weights, weights_only=True)
    return start


def _check_weights(path: Path, config: Config, data: Mixture) -> None:
    """Raise UserError if the checkpoint has another model, and warn if its positions are rotated
    otherwise or it has another tokenizer than the data, which may be on purpose. Called on rank 0.
    """
    trainer = parse_trainer(path)
    check_model(path, trainer, config, ROTATION_KEYS)
    for key in sorted(ROTATION_KEYS):
        was, now = (getattr(each, key) for each in (trainer.model_config_saved, config.model))
        if was != now:
            log(f"warning: model.{key}={now}, and the weights in {path} were trained with {was}")
    try:
        sha256 = Tokenizer.load(path).sha256
    except UserError:  # none that can be read
        return
    if sha256 != data.tokenizer_sha256:
        log(
            f"warning: the weights in {path} were trained with another tokenizer (sha256 "
            f"{sha256[:12]}…) than the data's, {data.tokenizer_path} ({data.tokenizer_sha256[:12]}"
            "…): unless one is the other in another format, their embeddings mean other tokens"
        )


def _began_at(resume: str, lease: Lease) -> tuple[float, bool]:
    """The step at which the run began with a checkpoint of `resume` (a checkpoint, or a run): what
    it has saved since comes from there, and a later start with the same setting continues it.
    Infinite if it began otherwise: nothing in its folder is used. And whether it may have saved
    since. Called on rank 0."""
    if resume in ("auto", "none"):
        return (-1 if resume == "auto" else math.inf), True
    begun, has_saved, own = math.inf, False, lease.checkpoints.absolute()
    for event in read_events(lease.run_dir):
        # A name is in `own`. Other runs', and in older versions all, have absolute paths.
        came_from = own / str(event.get("checkpoint", "/"))
        if event["event"] == "start" and came_from.parent != own:
            is_that = Path(resume).absolute() in (came_from, *came_from.parents)
            begun, has_saved = event["step"] if is_that else math.inf, False
        has_saved |= event["event"] == "checkpoint" and "failed" not in event
    return begun, has_saved


def _put_incomplete_aside(lease: Lease) -> None:
    """Put aside folders that have a checkpoint's name but no manifest, because someone copied or
    deleted a part of them. Called on rank 0."""
    for path in sorted(named_checkpoints(lease.checkpoints)):
        if not is_file(path / MANIFEST):
            aside = lease.put_aside(path, DAMAGED).name
            log(f"warning: {path} has no {MANIFEST}: it is put aside as {aside} and not used")
    lease.name_latest()


def _refuse_to_begin_anew(resume: str, lease: Lease) -> None:
    """Raise UserError if the run had checkpoints, and all are damaged: a copy of one may be
    elsewhere."""
    if damaged := sorted(path.name for path in lease.checkpoints.glob(f"step-*{DAMAGED}")):
        why = f"all that the run has saved in {lease.checkpoints} is damaged: {', '.join(damaged)}"
        remedy = "restore one (tools.objects fetch), or move these elsewhere to begin anew"
        raise UserError("checkpoint.resume", resume, why, remedy)


def _named(folder: str, key: str) -> Path:
    """Return `folder` if it is a checkpoint, or the newest checkpoint of the run that it holds, as
    the tools do. Raises UserError, on every rank, if there is none or it is damaged."""
    path = from_rank_0(lambda: checkpoints_of(Path(folder), key)[-1])
    require_good(path, key)
    return path


def find_before(
    last_step: int, config: Config, data: Sequence[Mixture], begun: Start, lease: Lease
) -> Start | None:
    """Find the checkpoint that a running run goes back to: the newest good one that it has saved
    up to `last_step`, or, without one, that of another run from which it was resumed, if that is
    as early and still good. If one is found, later checkpoints are put aside; if none is, None is
    returned."""
    path = _newest_good(lease, last_step)
    is_older = path is None or step_of(path) < begun.step  # that of a run before, or there is none
    source, own = None if begun.weights_only else begun.path, lease.checkpoints
    if source and is_older and from_rank_0(lambda: source.absolute().parent != own.absolute()):
        path = source if begun.step <= last_step and _is_good(source) else None
    if path is None:
        return None

    def go_back() -> Start:
        for later in reversed(complete_checkpoints(lease.checkpoints)):
            if step_of(later) > last_step:
                log(
                    f"warning: {lease.put_aside(later, ABANDONED)} was saved after the "
                    "rollback point and is not used again"
                )
        return _start_from(path, config, data, lease)

    return from_rank_0(go_back)


def _start_from(path: Path | None, config: Config, data: Sequence[Mixture], lease: Lease) -> Start:
    """Read and check a start on rank 0, from the good checkpoint `path`, if there is one."""
    if path is None:
        start = Start(state_of(config, beginning(data[0])))
    else:
        trainer = parse_trainer(path)
        check_history(path, trainer, config, data)
        if trainer.step > config.train.steps:
            why = f"the checkpoint {path} is already at step {trainer.step}"
            remedy = f"give {trainer.step} or more, or another run.dir"
            raise UserError("train.steps", config.train.steps, why, remedy)
        start = Start(at_boundary(trainer, config, data), path)
    later = [c for c in complete_checkpoints(lease.checkpoints) if step_of(c) > start.step]
    if later:
        why = (
            f"it holds {later[-1].name}, which this run would not start from "
            "and would eventually delete"
        )
        remedy = "choose another run.dir, or checkpoint.resume=auto"
        raise UserError("run.dir", config.run.dir, why, remedy)
    return start


def _newest_good(lease: Lease, last_step: float = math.inf) -> Path | None:
    """Return the newest undamaged checkpoint of the run folder up to `last_step`. Damaged ones are
    put aside with a warning."""
    found = from_rank_0(lambda: complete_checkpoints(lease.checkpoints))
    for path in reversed(found):
        if step_of(path) > last_step:
            continue
        if _is_good(path):
            return path
        if dist.get_rank() == 0:
            log(f"{path.name} is put aside as {lease.put_aside(path, DAMAGED).name}")
        dist.barrier()
    return None


def _is_good(path: Path) -> bool:
    """Whether a checkpoint is undamaged, the same on every rank. If not, rank 0 warns."""
    try:
        _check_undamaged(path)
    except Damaged as problem:
        if dist.get_rank() == 0:
            log(f"warning: {path} is damaged: {problem}. It is not used")
        return False
    return True


def require_good(path: Path, key: str) -> None:
    """Raise UserError, on every rank, if the checkpoint that `key` selects is damaged."""
    try:
        _check_undamaged(path)
    except Damaged as problem:
        why = f"is not a valid checkpoint: {problem}"
        raise AgreedError(key, str(path), why, "give another folder step-…") from None


def _check_undamaged(path: Path) -> None:
    """Raise Damaged, on every rank, if a checkpoint is damaged. Rank 0 reads what describes it, and
    each rank its share of the files."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def covered_by_mine() -> Counter[str]:
        mine = sorted(manifest.files)[rank::world]
        return check_files(path, manifest, mine, point, shown=rank == 0)

    manifest, point = from_rank_0(lambda: described(path), Damaged)
    everyone = [on_all_ranks(covered_by_mine, Damaged)] * world
    dist.all_gather_object(everyone, everyone[rank])
    check_whole(manifest, sum(everyone, Counter[str]()), point)


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

    def read() -> None:
        try:
            placed = {name: Placed(tensor.to_local(), tensor) for name, tensor in wanted.items()}
            dcp.load(placed, storage_reader=HuggingFaceStorageReader(str(path)))
        except dcp.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            if isinstance(first, OSError):  # the files were there when they were checked
                raise first from None
            why = f"cannot be read: {first}"
            raise UserError("checkpoint", str(path), why, "choose another checkpoint") from None

    on_all_ranks(read)
    for source, copy in second_copies:
        copy.copy_(source)
    if not start.weights_only:
        train.optimizer.set_updates(start.state.updates)
        state = start.state
        train.guard.restore(state.recent_losses, state.bad_in_a_row, state.loss_scale)
