"""Safetensors files of a folder: reads one tensor at a time, and writes files of bounded size.

Reading maps a file into memory without a copy, and the system can evict mapped pages. Writing keeps
the tensors of one file in memory. So a model of any size needs only the memory of one file.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.contents import first_bytes, known
from errors import UserError
from model.config import ModelConfig
from runtime.checkpoints.manifest import PLACES
from runtime.checkpoints.progress import byte_bar
from tools.huggingface.config import CONFIG, COPY_AGAIN, parameters, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_BYTES = 5_000_000_000  # as transformers 4 wrote them
# safetensors' name → torch's dtype
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A process often may open only a thousand files; a checkpoint of many ranks has as many files.
OPEN_FILES = 128


def file_opener() -> Callable[[Path], Any]:
    """A function that maps a safetensors file and keeps the most recently used files open."""
    return lru_cache(maxsize=OPEN_FILES)(lambda path: safe_open(path, framework="pt"))


class FolderTensors:
    """The tensors of a Hugging Face folder: one file, or several with an index.

    shapes: name → shape; dtypes: name → safetensors' name of the dtype (`BF16`). Raises UserError
    with the key --hf if a file is missing, damaged or inconsistent with the index.
    """

    def __init__(self, folder: Path) -> None:
        self._open = file_opener()
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        index = self._read_index(folder)
        for path in sorted({folder / SINGLE} if index is None else set(index.values())):
            try:
                opened = self._open(path)
                for name in opened.keys():  # noqa: SIM118 - not a dictionary
                    piece = opened.get_slice(name)
                    self._file_of[name] = path
                    self.shapes[name] = tuple(piece.get_shape())
                    self.dtypes[name] = piece.get_dtype()
            except (SafetensorError, OSError) as error:
                what, remedy = (path.is_file() and known(first_bytes(path))) or (
                    f"not a readable safetensors file: {error}",
                    COPY_AGAIN,
                )
                raise UserError("--hf", str(path), f"it is {what}", remedy) from None
        for name, path in (index or {}).items():
            if self._file_of.get(name) != path:
                why = f"it has no tensor {name}, although {INDEX} lists it there"
                raise UserError("--hf", str(path), why, COPY_AGAIN)

    @staticmethod
    def _read_index(folder: Path) -> dict[str, Path] | None:
        """Name → file; None if there is a single file without an index."""
        if not (folder / INDEX).is_file():
            if (folder / SINGLE).is_file():
                return None
            pickled = sorted(path.name for path in folder.glob("*.bin"))
            why = f"it has neither {SINGLE} nor {INDEX}"
            if pickled:
                why += (
                    f", and {pickled[0]} would have to be unpickled, which can run arbitrary code"
                )
            raise UserError("--hf", str(folder), why, "give a folder with safetensors files")
        files = read_json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in files.values()
        ):
            why = "it has no weight_map from tensors to files in its folder"
            raise UserError("--hf", str(folder / INDEX), why, COPY_AGAIN)
        return {name: folder / file for name, file in files.items()}

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, memory-mapped: it must not be modified."""
        return self._open(self._file_of[name]).get_tensor(name)


def check_tensors(hf: Path, model: ModelConfig, tensors: FolderTensors) -> None:
    """Raises UserError unless the folder has exactly the tensors of this model, with the right
    shapes and not quantized."""
    wanted = parameters(model)
    shapes = {p.theirs: p.shape for p in wanted}
    # Older versions stored inv_freq with the weights, although it follows from rope_theta.
    found = {name for name in tensors.shapes if not name.endswith("rotary_emb.inv_freq")}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if (
        model.tie_embeddings
        and {head, embedding} <= found
        and torch.equal(tensors.tensor(head), tensors.tensor(embedding))
    ):
        found.remove(head)  # some files contain the tied head too
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - found)]
    problems += [f"{name} is not a tensor of this model" for name in sorted(found - shapes.keys())]
    for name in sorted(shapes.keys() & found):
        if tensors.shapes[name] != shapes[name]:
            problems.append(
                f"{name} has shape {tensors.shapes[name]}, but by {CONFIG} it has {shapes[name]}"
            )
        elif tensors.dtypes[name] not in DTYPES:
            problems.append(
                f"{name} has dtype {tensors.dtypes[name]}, not one of {', '.join(DTYPES)}"
            )
    dtypes_of: dict[str, set[str]] = defaultdict(set)
    for p in filter(lambda p: p.theirs in found, wanted):
        dtypes_of[p.ours].add(tensors.dtypes[p.theirs])
        if len(dtypes_of[p.ours]) == 2:
            problems.append(f"{p.theirs} has another dtype than the experts before it")
            break
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        why = f"its tensors do not match its {CONFIG}: {'; '.join(problems[:3])}{more}"
        remedy = f"{COPY_AGAIN}; biases, adapters and quantized weights are not supported"
        raise UserError("--hf", str(hf), why, remedy)


class Piece(NamedTuple):
    """A tensor to be written."""

    name: str
    num_bytes: int
    load: Callable[[], Tensor]


def write_files(
    folder: Path,
    pieces: Iterable[Piece],
    file_bytes: int,
    metadata: Callable[[dict[str, Tensor]], dict[str, str]],
    task: str,
) -> Any:
    """Writes `pieces` to safetensors files in `folder`, and returns huggingface_hub's plan: which
    tensors are in which file.

    A file has as many tensors as fit into `file_bytes`, or one that is larger. A single file is
    named `model.safetensors`.

    Args:
        metadata: returns the metadata, stored in the header, of a file with these tensors.
        task: the label of the progress bar.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # comes with datasets

    by_name = {piece.name: piece for piece in pieces}
    plan = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda piece: piece.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=file_bytes,
    )
    with byte_bar(task, plan.metadata["total_size"]) as bar:
        for file, names in plan.filename_to_tensors.items():
            tensors = {}
            for name in names:
                tensors[name] = by_name[name].load()
                bar.update(by_name[name].num_bytes)
            save_file(tensors, folder / file, metadata=metadata(tensors))
    return plan


def whole_places(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Metadata for a checkpoint's file: the position of its tensors in the global ones. Each is
    whole, so it begins at 0."""
    places = {name: {"saved_offsets": [0] * tensor.ndim} for name, tensor in tensors.items()}
    return {PLACES: json.dumps(places)}
