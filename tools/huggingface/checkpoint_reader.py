"""Reads a checkpoint without a run: finds the newest one, and reads its global tensors one at a
time, whatever layout saved them.

    shard-00001-…   model.blocks.0.attention.query.weight   rows 0 … 63    ┐
    shard-00002-…   model.blocks.0.attention.query.weight   rows 64 … 127  ┴─►  [128, D]

A tensor, or a region of it (one expert, some rows, a rank's shard), is assembled from its pieces
only when it is read, so the memory needed is that of the largest tensor, not that of the model.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from errors import UserError
from model.config import ModelConfig
from runtime.checkpoints.manifest import (
    TENSORS,
    Damaged,
    Manifest,
    check_whole,
    read_manifest,
    read_pieces,
)
from runtime.checkpoints.run_folder import checkpoints_of
from runtime.checkpoints.tiling import random_point, value_at
from runtime.checkpoints.trainer_state import TrainerState, read_trainer, verify_checkpoint
from tools.huggingface.tensor_files import DTYPES, file_opener

WEIGHTS = "model."  # the prefix of weights; optimizer state has the prefix "optimizer."


def newest(folder: Path) -> Path:
    """`folder` if it is a checkpoint, else the newest complete one in it or its `checkpoints/`."""
    return checkpoints_of(folder, "--checkpoint")[-1]


class CheckpointReader:
    """The weights of one checkpoint.

    Opening reads only the manifest and the headers of the files; with `verified` it reads every
    file and compares its checksum first. Raises UserError with this key if the folder is not a
    checkpoint, or if its files do not contain every tensor element exactly once.
    """

    def __init__(self, folder: Path, key: str = "--checkpoint", verified: bool = False) -> None:
        self.folder, self._open = folder, file_opener()
        # tensor → its pieces: (file, offsets of the piece in the global tensor)
        self._pieces: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        covered: Counter[str] = Counter()
        point = random_point()
        try:
            if verified:
                verify_checkpoint(folder)
            # this also compares the files' sizes with the manifest
            self.trainer: TrainerState = read_trainer(folder, key)
            self.model: ModelConfig = self.trainer.model_config_saved
            self.manifest: Manifest = read_manifest(folder)
            for file in filter(lambda name: name.endswith(TENSORS), self.manifest.files):
                for piece in read_pieces(folder / file, self.manifest):
                    self._pieces[piece.name].append((file, piece.offsets))
                    covered[piece.name] += value_at(point, piece.offsets, piece.sizes)
            check_whole(self.manifest, covered, point)
        except Damaged as damaged:
            why = f"is not a valid checkpoint: {damaged}"
            raise UserError(key, str(folder), why, "give another step-… folder") from None

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name (`blocks.0.attention.query.weight`) → its global shape."""
        tensors = self.manifest.tensors.items()
        return {
            name.removeprefix(WEIGHTS): shape
            for name, (_, shape) in tensors
            if name.startswith(WEIGHTS)
        }

    def require(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises UserError unless these are the weights and their shapes."""
        if shapes != self.weights():
            why = "its tensors do not match the model in its trainer.json"
            remedy = "give another step-… folder"
            raise UserError("--checkpoint", str(self.folder), why, remedy)

    def weight(self, name: str, index: int | None = None) -> Tensor:
        """The global tensor, or of its first dimension only `index`."""
        _, (rows, *others) = self.manifest.tensors[WEIGHTS + name]
        first = range(rows) if index is None else range(index, index + 1)
        found = self.region(name, [first, *map(range, others)])
        return found if index is None else found[0]

    def region(self, name: str, region: Sequence[range]) -> Tensor:
        """A part of the global tensor, on the CPU, in the dtype in which it was saved."""
        dtype, _ = self.manifest.tensors[WEIGHTS + name]
        found = torch.empty([len(part) for part in region], dtype=DTYPES[dtype])
        for file, offsets in self._pieces[WEIGHTS + name]:
            piece = self._open(self.folder / file).get_slice(WEIGHTS + name)
            sizes = piece.get_shape()
            common = [
                range(max(part.start, at), min(part.stop, at + size))
                for part, at, size in zip(region, offsets, sizes, strict=True)
            ]
            if all(common):  # none is empty
                in_region = _slices(common, [part.start for part in region])
                found[in_region] = piece[_slices(common, offsets)]
        return found


def _slices(parts: Sequence[range], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(part.start - at, part.stop - at) for part, at in zip(parts, origin, strict=True)
    )
