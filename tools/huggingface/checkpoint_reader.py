"""Reads a checkpoint without a run: finds the newest one, and reads its global tensors one at a
time, whatever layout saved them.

    shard-00001-…   model.blocks.0.attention.query.weight   rows 0 … 63    ┐
    shard-00002-…   model.blocks.0.attention.query.weight   rows 64 … 127  ┴─►  [128, D]

A tensor, or a region of it (one expert, some rows, a rank's shard), is assembled from its pieces
only when it is read, so the memory needed is that of the largest tensor, not that of the model.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from errors import UserError
from model.config import ModelConfig
from model.router import bias_name, routers_of
from model.transformer import Transformer
from parallel.layer import TensorParallel
from parallel.parameter import weights_of
from runtime.checkpoint.folder import checkpoints_of
from runtime.checkpoint.manifest import TENSORS, Damaged, read_manifest
from runtime.checkpoint.tensor_files import Piece, read_pieces
from runtime.checkpoint.verify import parse_trainer, verify_checkpoint

WEIGHTS = "model."  # the prefix of weights; optimizer state has the prefix "optimizer."
# safetensors' name → torch's dtype
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A process often may open only a thousand files; a checkpoint of many ranks has as many files.
OPEN_FILES = 128

Stored = dict[str, tuple[str, tuple[int, ...]]]  # tensor → safetensors' name of its dtype, shape


def newest(folder: Path) -> Path:
    """`folder` if it is a checkpoint, else the newest complete one in it or its `checkpoints/`."""
    return checkpoints_of(folder, "--checkpoint")[-1]


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The global shape of every weight, without a tied head, and of every bias of a router."""
    whole = Transformer(model, range(model.num_layers), True, True, TensorParallel())
    weights = {each.name: each.spec.shape for each in weights_of(whole) if not each.is_copy}
    routers = [(layer, router) for layer, router in routers_of(whole) if router.has_bias]
    return weights | {bias_name(layer): (router.num_experts,) for layer, router in routers}


class WeightReader:
    """The weights of a model, by their names in it (`blocks.0.attention.query.weight`), each
    assembled from its parts.

    max_length: the sequence length of the training, or the longest that the model is meant for.
    """

    model: ModelConfig
    max_length: int

    def __init__(self) -> None:
        self.tensors: Stored = {}
        # tensor → its pieces, each under its name in a file
        self._pieces: dict[str, list[tuple[Path, Piece]]] = defaultdict(list)
        # maps files into memory: nothing is copied, and the system can evict mapped pages
        self._open = lru_cache(maxsize=OPEN_FILES)(lambda file: safe_open(file, framework="pt"))

    def weight(self, name: str, index: int | None = None) -> Tensor:
        """The global tensor, or of its first dimension only `index`."""
        rows, *others = self.tensors[name][1]
        first = range(rows) if index is None else range(index, index + 1)
        found = self.region(name, [first, *map(range, others)])
        return found if index is None else found[0]

    def region(self, name: str, region: Sequence[range]) -> Tensor:
        """A part of the global tensor, on the CPU, in the dtype in which it was saved."""
        found = torch.empty([len(part) for part in region], dtype=DTYPES[self.tensors[name][0]])
        for file, piece in self._pieces[name]:
            common = [
                range(max(part.start, at), min(part.stop, at + size))
                for part, at, size in zip(region, piece.offsets, piece.sizes, strict=True)
            ]
            if all(common):  # none is empty
                stored = self._open(file).get_slice(piece.name)
                # a tensor of one expert has one dimension less
                inside = _slices(common, piece.offsets)[-len(stored.get_shape()) :]
                found[_slices(common, [part.start for part in region])] = stored[inside]
        return found


def _slices(parts: Sequence[range], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(part.start - at, part.stop - at) for part, at in zip(parts, origin, strict=True)
    )


class CheckpointReader(WeightReader):
    """The weights of one checkpoint, with the biases of routers.

    Opening reads every file and compares it with its checksum, unless that has been done
    (`verified`); then it reads only the manifest and the headers of the files. Raises UserError
    with this key if the folder is not a valid checkpoint.
    """

    def __init__(self, folder: Path, key: str = "--checkpoint", verified: bool = False) -> None:
        super().__init__()
        self.folder, self._key = folder, key
        try:
            manifest = read_manifest(folder) if verified else verify_checkpoint(folder)
            self.trainer = parse_trainer(folder)
            for file in filter(lambda name: name.endswith(TENSORS), manifest.files):
                for piece in read_pieces(folder / file, manifest):
                    self._pieces[piece.name.removeprefix(WEIGHTS)].append((folder / file, piece))
        except Damaged as damaged:
            why = f"is not a valid checkpoint: {damaged}"
            raise UserError(key, str(folder), why, "give another step-… folder") from None
        self.model, self.max_length = self.trainer.model_config_saved, self.trainer.seq_len
        self.tensors = {
            name.removeprefix(WEIGHTS): stored
            for name, stored in manifest.tensors.items()
            if name.startswith(WEIGHTS)
        }

    def check_model(self) -> None:
        """Raises UserError unless the tensors are those of the model in trainer.json."""
        if {name: shape for name, (_, shape) in self.tensors.items()} != shapes_of(self.model):
            why = "its tensors do not match the model in its trainer.json"
            raise UserError(self._key, str(self.folder), why, "give another step-… folder")
