"""Reads a checkpoint without a run: finds the newest one, and reads its global tensors one at a
time, whatever layout saved them.

    shard-00001-…   model.blocks.0.attention.query.weight   rows 0 … 63    ┐
    shard-00002-…   model.blocks.0.attention.query.weight   rows 64 … 127  ┴─►  [128, D]

A tensor is assembled from its pieces only when it is read, and of the tensor of all experts each
one by itself, so the memory needed is that of the largest tensor, not that of the model.
"""

from collections import Counter, defaultdict
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
from runtime.checkpoints.trainer_state import TrainerState, read_trainer
from tools.huggingface.tensor_files import DTYPES, file_opener

WEIGHTS = "model."  # the prefix of weights; optimizer state has the prefix "optimizer."


def newest(folder: Path) -> Path:
    """`folder` if it is a checkpoint, else the newest complete one in it or its `checkpoints/`."""
    return checkpoints_of(folder, "--checkpoint")[-1]


class CheckpointReader:
    """The weights of one checkpoint.

    Opening reads only the manifest and the headers of the files, and does not verify checksums
    (runtime/checkpoints/manifest.py does). Raises UserError with the key --checkpoint if the folder
    is not a checkpoint, or if its files do not contain every tensor element exactly once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._open = folder, file_opener()
        # this also compares the files' sizes with the manifest
        self.trainer: TrainerState = read_trainer(folder, "--checkpoint")
        self.model: ModelConfig = self.trainer.model_config_saved
        # tensor → its pieces: (file, offsets of the piece in the global tensor)
        self._pieces: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        covered: Counter[str] = Counter()
        point = random_point()
        try:
            self.manifest: Manifest = read_manifest(folder)
            for file in self.manifest.files:
                for piece in (
                    read_pieces(folder / file, self.manifest) if file.endswith(TENSORS) else []
                ):
                    self._pieces[piece.name].append((file, piece.offsets))
                    covered[piece.name] += value_at(point, piece.offsets, piece.sizes)
            check_whole(self.manifest, covered, point)
        except Damaged as damaged:
            why = f"is not a valid checkpoint: {damaged}"
            remedy = "give another step-… folder"
            raise UserError("--checkpoint", str(folder), why, remedy) from None

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name (`blocks.0.attention.query.weight`) → its global shape."""
        tensors = self.manifest.tensors.items()
        return {
            name.removeprefix(WEIGHTS): shape
            for name, (_, shape) in tensors
            if name.startswith(WEIGHTS)
        }

    def weight(self, name: str, index: int | None = None) -> Tensor:
        """The global tensor, or of its first dimension only `index`, on the CPU, in the dtype in
        which it was saved."""
        _, shape = self.manifest.tensors[WEIGHTS + name]
        if index is None:
            return self.rows(name, range(shape[0]))
        return self.rows(name, range(index, index + 1))[0]

    def rows(self, name: str, rows: range) -> Tensor:
        """A part of the first dimension of the global tensor, as `weight`."""
        dtype, shape = self.manifest.tensors[WEIGHTS + name]
        found = torch.empty((len(rows), *shape[1:]), dtype=DTYPES[dtype])
        for file, offsets in self._pieces[WEIGHTS + name]:
            piece = self._open(self.folder / file).get_slice(WEIGHTS + name)
            first, *others = zip(offsets, piece.get_shape(), strict=True)
            begin, end = max(rows.start, first[0]), min(rows.stop, sum(first))
            if begin < end:
                place = [slice(begin - rows.start, end - rows.start)]
                place += [slice(at, at + n) for at, n in others]
                found[tuple(place)] = piece[begin - first[0] : end - first[0]]
        return found
