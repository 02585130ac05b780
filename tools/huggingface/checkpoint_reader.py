"""Reading a checkpoint without a run: which one, and its global tensors one at a time, whatever layout saved them.

    shard-00001-…   model.blocks.0.attention.query.weight   rows 0 … 63    ┐
    shard-00002-…   model.blocks.0.attention.query.weight   rows 64 … 127  ┴─►  [128, D]

A tensor is put together from its pieces when it is asked for, so the largest one bounds the memory and not the model.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from errors import UserError
from model.config import ModelConfig
from tools.huggingface.tensor_files import DTYPES, file_opener
from training.checkpoint import checkpoints_of, read_trainer
from training.manifest import PLACES, TENSORS, Damaged, Manifest, read_manifest

WEIGHTS = "model."  # names of weights begin so; those of the optimizer's state with "optimizer."


def newest(folder: Path) -> Path:
    """`folder` itself if it is a checkpoint, else the newest complete one in it, or in its `checkpoints/`."""
    return checkpoints_of(folder, "--checkpoint")[-1]


class CheckpointReader:
    """The weights of one checkpoint.

    Opening reads the manifest and the headers of the files, no tensor, and compares no checksum (training/manifest.py does).
    Raises UserError, naming --checkpoint, where the folder is no checkpoint or one of its files is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._open = folder, file_opener()
        self.trainer: dict[str, Any] = read_trainer(folder, "--checkpoint")  # trainer.json; it compares the files' sizes too
        self.model = ModelConfig(**self.trainer["model"])
        self._pieces: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)  # tensor → file, where the piece begins
        try:
            self.manifest: Manifest = read_manifest(folder)
            for file in self.manifest.files:
                if file.endswith(TENSORS):
                    places = json.loads((self._open(folder / file).metadata() or {}).get(PLACES, "{}"))
                    for name, place in places.items():
                        self._pieces[name].append((file, place["saved_offsets"]))
        except (Damaged, SafetensorError, OSError, ValueError, KeyError) as damaged:
            raise self._refusal(str(damaged)) from None

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name (`blocks.0.attention.query.weight`) → global shape."""
        tensors = self.manifest.tensors.items()
        return {name.removeprefix(WEIGHTS): shape for name, (_, shape) in tensors if name.startswith(WEIGHTS)}

    def weight(self, name: str) -> Tensor:
        """The whole global tensor, on the CPU, in the dtype that it was saved in."""
        dtype, shape = self.manifest.tensors[WEIGHTS + name]
        whole = torch.empty(shape, dtype=DTYPES[dtype])
        read = 0
        for file, offsets in self._pieces[WEIGHTS + name]:
            piece = self._open(self.folder / file).get_tensor(WEIGHTS + name)
            whole[tuple(slice(at, at + n) for at, n in zip(offsets, piece.shape, strict=True))] = piece
            read += piece.numel()
        if read != math.prod(shape):
            raise self._refusal(f"{read:,} of {math.prod(shape):,} numbers of {name} are in its files")
        return whole

    def _refusal(self, why: str) -> UserError:
        return UserError("--checkpoint", str(self.folder), f"is no good checkpoint: {why}", "give another folder step-…")
