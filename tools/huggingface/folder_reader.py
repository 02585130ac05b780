"""Reads the weights of a Hugging Face folder as those of a checkpoint are read.

model.layers.3.mlp.experts.0.gate_proj.weight     [F, D]  ┐
model.layers.3.mlp.experts.1.gate_proj.weight     [F, D]  ├─►  blocks.3.….gate.weight  [X, F, D]
         …                                                ┘
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from data.contents import first_bytes, pointer
from errors import UserError
from runtime.checkpoint.tensor_files import Piece
from tools.huggingface.checkpoint_reader import DTYPES, WeightReader
from tools.huggingface.config import CONFIG, COPY_AGAIN, HuggingFaceConfig, Parameter, parameters

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Theirs = tuple[Path, str, tuple[int, ...]]  # a tensor's file, dtype and shape


class FolderReader(WeightReader):
    """The model of a Hugging Face folder, and its weights, in one file or in several.

    Raises UserError, with this key if a file is missing or damaged, unless the folder has exactly
    the tensors of the model in its config.json, with the right shapes and not quantized.
    """

    def __init__(self, folder: Path, key: str = "--hf") -> None:
        super().__init__()
        self._folder, self._key = folder, key
        config = HuggingFaceConfig(folder, key)
        self.model, self.max_length = config.model, config.max_length
        theirs, wanted = self._read_headers(), parameters(self.model)
        if problems := list(self._problems(theirs, wanted)):
            more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
            why = f"its tensors do not match its {CONFIG}: {'; '.join(problems[:3])}{more}"
            remedy = f"{COPY_AGAIN}; biases, adapters and quantized weights are not supported"
            raise self._refusal(folder, why, remedy)
        for each in wanted:
            file, dtype, _ = theirs[each.theirs]
            self.tensors[each.ours] = dtype, each.our_shape
            offsets, sizes = [0] * len(each.our_shape), list(each.our_shape)
            if each.expert is not None:
                offsets[0], sizes[0] = each.expert, 1
            piece = Piece(each.theirs, tuple(offsets), tuple(sizes))
            self._pieces[each.ours].append((file, piece))

    def _refusal(self, path: Path, why: str, remedy: str = COPY_AGAIN) -> UserError:
        return UserError(self._key, str(path), why, remedy)

    def _read_headers(self) -> dict[str, Theirs]:
        """All tensors in the files. Their headers are read, not the index, which may be older."""
        found: dict[str, Theirs] = {}
        try:
            files = [file for file in self._folder.iterdir() if FILES.fullmatch(file.name)]
        except OSError as error:
            why = f"it cannot be read ({error.strerror})"
            raise self._refusal(self._folder, why, "give a folder that you may read") from None
        sets = {file.stem.rpartition("-of-")[2]: file.name for file in sorted(files)}
        if len(sets) > 1:
            why = f"it has two sets of weights: {' and '.join(sorted(sets.values()))}"
            raise self._refusal(self._folder, why, "remove the files that are out of date")
        if not files:
            why = f"it has no {SINGLE}, nor model-00001-of-…"
            if any(self._folder.glob("*.bin")):
                why += "; *.bin would have to be unpickled, which can run any code"
            raise self._refusal(self._folder, why, f"rename them to these ({INDEX} is not read)")
        for file in sorted(files):
            try:
                opened = self._open(file)
                for name in opened.keys():  # noqa: SIM118 - not a dictionary
                    if name in found:
                        raise self._refusal(file, f"{found[name][0].name} has {name} too")
                    stored = opened.get_slice(name)
                    found[name] = file, stored.get_dtype(), tuple(stored.get_shape())
            except (SafetensorError, OSError) as error:
                damage = f"not a readable safetensors file: {error}", COPY_AGAIN
                what, remedy = (file.is_file() and pointer(first_bytes(file))) or damage
                raise self._refusal(file, f"it is {what}", remedy) from None
        return found

    def _problems(self, theirs: dict[str, Theirs], parameters: list[Parameter]) -> Iterator[str]:
        """What is wrong with the tensors in the files."""
        wanted = {each.theirs: each for each in parameters}
        # Older versions stored inv_freq with the weights, although it follows from rope_theta.
        found = {name for name in theirs if not name.endswith("rotary_emb.inv_freq")}
        if self.model.tie_embeddings and {HEAD, EMBEDDING} <= found:
            head, embedding = (
                self._open(theirs[name][0]).get_tensor(name) for name in (HEAD, EMBEDDING)
            )
            if torch.equal(head, embedding):
                found.remove(HEAD)  # some files contain the tied head too
        for name in sorted(found - wanted.keys()):
            yield f"{name} is not a tensor of this model"
        dtype_of: dict[str, str] = {}  # by our names
        for name, each in wanted.items():
            if name not in found:
                yield f"{name} is missing"
                continue
            _, dtype, shape = theirs[name]
            if shape != each.shape:
                yield f"{name} has shape {shape}, but by {CONFIG} it has {each.shape}"
            elif dtype not in DTYPES:
                yield f"{name} has dtype {dtype}, not one of {', '.join(DTYPES)}"
            elif dtype_of.setdefault(each.ours, dtype) != dtype:
                yield f"{name} has another dtype than the experts before it"
