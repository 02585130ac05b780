"""Checkpoints: the global tensors through DCP's safetensors storage, and where the run stands in JSON. Nothing is pickled.

    checkpoints/step-00000100/   *.safetensors   model.NAME and optimizer.NAME.exp_avg[_sq], each rank its shards
                                 trainer.json    step, tokens, the data's state, the model's dimensions
                                 tokenizer.model
    checkpoints/latest           the name of the newest complete one

A checkpoint is written under a name that ends in `.partial` and renamed when every rank is done: a name without a suffix is
complete. Tensors are stored under their global names and shapes, so any layout loads what any other saved.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from data.dataset import Mixture
from data.loader import check_state
from errors import UserError
from model.initialise import canonical_name
from training.config import Config
from training.step import TrainStep
from training.voice import from_rank_0, together

NAME = re.compile(r"step-(\d{8})")
FORMAT, VERSION = "lattice-checkpoint", 1
# Dimensions alone decide whether weights fit; how they began, what is minimised and what computes it do not.
FREE_MODEL_KEYS = {"init_std", "z_loss", "kernels"}


def checkpoint_folder(config: Config) -> Path:
    return Path(config.run.dir) / "checkpoints"


def save(train: TrainStep, step: int, tokens: int, data_state: dict[str, Any], tokenizer: Path) -> Path:
    """Save after `step` updates; every rank calls it. Returns the finished checkpoint's folder."""
    folder = checkpoint_folder(train.config)
    final = folder / f"step-{step:08d}"
    partial = final.with_suffix(".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
        partial.mkdir(parents=True)
    dist.barrier()
    tensors = {name: t for name, t in _local_tensors(train) if canonical_name(name, train.config.model) == name}
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True))
    if dist.get_rank() == 0:
        trainer = {
            "format": FORMAT,
            "version": VERSION,
            "files": {file.name: file.stat().st_size for file in sorted(partial.iterdir())},  # all but this one
            "step": step,
            "tokens": tokens,
            "seed": train.config.train.seed,
            "seq_len": train.config.train.seq_len,
            "model": dataclasses.asdict(train.config.model),
            "data": data_state,
        }
        shutil.copyfile(tokenizer, partial / "tokenizer.model")
        _write_durably(partial / "trainer.json", json.dumps(trainer, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _write_durably(folder / "latest.partial", final.name)
        os.replace(folder / "latest.partial", folder / "latest")
        for old in complete_checkpoints(folder)[: -train.config.checkpoint.keep_last]:  # `find_start`: none is later than ours
            shutil.rmtree(old)
    dist.barrier()
    return final


@dataclass(frozen=True)
class Start:
    """Where a run begins: from initial weights, from a checkpoint's weights alone, or where a checkpoint left off."""

    path: Path | None = None
    weights_only: bool = False
    step: int = 0  # updates made
    tokens: int = 0  # trained on
    next_sample: int = 0
    skipped: tuple[tuple[int, int], ...] = ()  # ranges of samples never to be read


def find_start(config: Config, data: Mixture, device: str) -> Start:
    """What `checkpoint.resume` and `checkpoint.load_weights_only` ask for, the same on every rank, checked against the
    configuration and the data. A checkpoint to resume from wins over one that only gives the first weights."""

    def choose() -> Start:
        resume = config.checkpoint.resume
        if resume == "auto":
            complete = complete_checkpoints(checkpoint_folder(config))
            path = complete[-1] if complete else None
        else:
            path = Path(resume) if resume != "none" else None
        if path is not None:
            trainer = read_trainer(path, "checkpoint.resume")
            _check_model(path, trainer, config)
            for name, value in (("seq_len", config.train.seq_len), ("seed", config.train.seed)):
                if trainer[name] != value:
                    why = f"the checkpoint {path} counts its samples in the order of train.{name}={trainer[name]}"
                    remedy = "use the checkpoint's, or start a new run from its weights: checkpoint.load_weights_only"
                    raise UserError(f"train.{name}", value, why, remedy)
            check_state(trainer["data"], data)
            skipped = tuple((begin, end) for begin, end in trainer["data"]["skipped"])
            start = Start(path, False, trainer["step"], trainer["tokens"], trainer["data"]["next_sample"], skipped)
        else:
            start = Start()
        own = complete_checkpoints(checkpoint_folder(config))
        later = [c for c in own if int(c.name.removeprefix("step-")) > start.step]
        if later:
            why = f"it holds {later[-1].name}, which this run would not start from, and would delete in time"
            raise UserError("run.dir", config.run.dir, why, "choose another run.dir, or checkpoint.resume=auto")
        if start.path is None and config.checkpoint.load_weights_only:
            path = Path(config.checkpoint.load_weights_only)
            _check_model(path, read_trainer(path, "checkpoint.load_weights_only"), config)
            return Start(path, weights_only=True)
        return start

    return from_rank_0(choose, device)


def read_trainer(path: Path, key: str) -> dict[str, Any]:
    """A checkpoint's trainer.json. `key` is the configuration key that chose the checkpoint, for the message."""
    try:
        trainer = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        format_and_version, files = (trainer["format"], trainer["version"]), dict(trainer["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            key, str(path), "is no complete checkpoint (no readable trainer.json)", "give a folder step-…"
        ) from None
    if format_and_version != (FORMAT, VERSION):
        raise UserError(key, str(path), f"was saved as {format_and_version}", f"this version reads {(FORMAT, VERSION)}")
    for name, size in files.items():  # DCP would not miss a file: it takes the shapes from what it finds
        file = path / name
        if Path(name).name != name or not file.is_file() or file.stat().st_size != size:
            raise UserError(key, str(path), f"its file {name} is missing or truncated", "choose another checkpoint")
    return trainer


def _check_model(path: Path, trainer: dict[str, Any], config: Config) -> None:
    for name, value in dataclasses.asdict(config.model).items():
        if name not in FREE_MODEL_KEYS and trainer["model"].get(name) != value:
            why = f"the checkpoint {path} has model.{name}={trainer['model'].get(name)!r}"
            raise UserError(f"model.{name}", value, why, "use the checkpoint's, or another checkpoint or run.dir")


def load(train: TrainStep, start: Start) -> None:
    """Fill this rank's weights, moments and update count (or weights alone) from a checkpoint of any layout."""
    if start.path is None:
        return
    wanted: dict[str, Tensor] = {}
    second_copies = []  # a tied weight that this rank holds twice is read once
    for name, tensor in _local_tensors(train):
        if start.weights_only and not name.startswith("model."):
            continue
        canonical = canonical_name(name, train.config.model)
        if canonical in wanted:
            second_copies.append((wanted[canonical], tensor))
        wanted.setdefault(canonical, tensor)

    def read() -> None:
        try:
            dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(start.path)))
        except dcp.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise UserError("checkpoint", str(start.path), f"cannot be read: {first}", "choose another checkpoint") from None

    together(read, train.mesh.device)
    for source, copy in second_copies:
        copy.copy_(source)
    if not start.weights_only:
        train.optimizer.set_step(start.step)


def _local_tensors(train: TrainStep) -> Iterator[tuple[str, Tensor]]:
    """Names and sharded tensors of all that this rank holds, sharing memory with the model and the optimizer."""
    for name, parameter in train.named_parameters:
        yield f"model.{name}", parameter.detach()
    for name, moment in train.optimizer.moments():
        yield f"optimizer.{name}", moment


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and (path / "trainer.json").is_file())


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
