"""Converts a Hugging Face folder to a checkpoint: `python -m tools.import_hf --hf DIR --out DIR`

The --hf folder contains config.json, safetensors files (with their index if there are several) and
a tokenizer (else give --tokenizer). The model is a Llama 2 to 3.2, a Mistral or Mixtral without a
sliding window, or a Qwen3 or Qwen3-MoE. Settings that Lattice's model does not support are refused
by name (huggingface/config.py). Weights keep their dtype, and are written in files of at most 5 GB,
or of one larger tensor; one file is in memory at a time.

--out becomes a checkpoint for checkpoint.load_weights_only, tools.generate, tools.verify and
tools.export. Its model.yaml is the `model` section for a configuration. The exit status is 2 if the
import is refused.
"""

import dataclasses
import json
import math
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from data.tokenizer import GENERATION, Tokenizer
from errors import UserError
from model.config import ModelConfig
from model.transformer import num_parameters
from runtime.checkpoints.manifest import MANIFEST
from runtime.checkpoints.trainer_state import FREE_MODEL_KEYS, model_entries
from tools.command import CommandParser, reports_errors, run_command
from tools.huggingface.agreement import check_tokens, generation_config
from tools.huggingface.checkpoint_reader import WEIGHTS
from tools.huggingface.config import (
    CONFIG,
    HuggingFaceConfig,
    Parameter,
    parameters,
    refuse_foreign,
)
from tools.huggingface.new_folder import refuse_existing, write_weights
from tools.huggingface.tensor_files import (
    DTYPES,
    FILE_BYTES,
    FolderTensors,
    Piece,
    check_tensors,
)

# written to model.yaml even if they have their default values
ALWAYS_SAID = ("norm_eps", "rope_theta", "tie_embeddings")


def import_hf(
    hf: Path, out: Path, file_bytes: int = FILE_BYTES, tokenizer_path: Path | None = None
) -> ModelConfig:
    """Writes the checkpoint `out`, completely or not at all. Raises UserError for what the user can
    fix.

    tokenizer_path: a tokenizer's file or folder; None: the one in `hf`.
    """
    refuse_existing(out)
    refuse_foreign(hf, "--hf")
    config = HuggingFaceConfig(hf)
    tensors = FolderTensors(hf)
    check_tensors(hf, config.model, tensors)
    tokenizer = load_tokenizer(hf, tokenizer_path)
    if tokenizer.vocab_size > config.model.vocab_size:
        why = f"the tokenizer has {tokenizer.vocab_size} tokens"
        remedy = "use config.json and tokenizer of the same model"
        raise UserError(f"{hf / CONFIG}: vocab_size", config.model.vocab_size, why, remedy)
    check_tokens(tokenizer, tokenizer_path or hf)
    generation = generation_config(hf, tokenizer, config.model.vocab_size)
    held, pieces = {}, []
    for ours, parts in groupby(parameters(config.model), lambda p: p.ours):
        first, *others = parts
        dtype = tensors.dtypes[first.theirs]
        held[WEIGHTS + ours] = dtype, first.our_shape
        size = math.prod(first.our_shape) * DTYPES[dtype].itemsize
        pieces.append(Piece(WEIGHTS + ours, size, partial(_load, tensors, [first, *others])))
    files = {
        **tokenizer.files,
        GENERATION: json.dumps(generation, indent=2).encode(),
        "model.yaml": model_yaml(config.model, out).encode(),
    }
    trainer = {
        "seed": 0,
        "seq_len": config.max_length,
        "model": model_entries(config.model),
        "data": {"checksum": "imported", "next_sample": 0, "skipped": []},
    }
    write_weights(out, pieces, held, files, trainer, file_bytes, f"importing {out.name}")
    return config.model


def _load(tensors: FolderTensors, parts: list[Parameter]) -> Tensor:
    """One of our tensors, from theirs."""
    loaded = [tensors.tensor(part.theirs) for part in parts]
    return loaded[0] if parts[0].expert is None else torch.stack(loaded)


def load_tokenizer(hf: Path, named: Path | None) -> Tokenizer:
    """Loads the model's tokenizer. Raises UserError with the key --tokenizer."""
    try:
        return Tokenizer.load(named or hf, check_beside=True)
    except UserError as error:
        why = error.why if named else f"{hf}: {error.why}"
        remedy = f"{error.remedy}; or give the model's tokenizer, its file or folder: "
        remedy += "--tokenizer PATH"
        remedy = error.remedy if named else remedy
        raise UserError("--tokenizer", named and str(named), why, remedy) from error


def said(model: ModelConfig) -> dict[str, Any]:
    """The keys of the section `model` that define this model."""
    fields = [field for field in dataclasses.fields(model) if field.name not in FREE_MODEL_KEYS]
    values = {field.name: getattr(model, field.name) for field in fields}
    return {
        f.name: values[f.name]
        for f in fields
        if f.name in ALWAYS_SAID or values[f.name] != f.default
    }


def model_yaml(model: ModelConfig, out: Path) -> str:
    """The section `model` for a configuration file."""
    return f"# The model of {out}, for a configuration file.\n" + yaml.safe_dump(
        {"model": said(model)}, sort_keys=False
    )


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.import_hf", description=__doc__)
    parser.required("--hf", Path, "DIR", "the folder in Hugging Face format")
    parser.required("--out", Path, "DIR", "the checkpoint to write, which must not exist yet")
    parser.option("--tokenizer", Path, "PATH", "the model's tokenizer (default: the one in --hf)")
    options = parser.parse_args(arguments)
    out = options.out
    model = import_hf(options.hf, out, tokenizer_path=options.tokenizer)
    size = sum(path.stat().st_size for path in out.iterdir() if path.name != MANIFEST)
    print(
        f"{out}: {num_parameters(model):,} parameters, {size:,} bytes, "
        f"and {MANIFEST} with their checksums"
    )
    print(
        f"to continue training it, copy the section in {out / 'model.yaml'} to a configuration, "
        "such as configs/mine.yaml, and run"
    )
    print(
        f"  python -m tools.prepare --source 'corpus/*.jsonl' --tokenizer {out} --out prepared/mine"
    )
    print("  torchrun --nproc-per-node 8 train.py configs/mine.yaml data.path=prepared/mine \\")
    print(f"      checkpoint.load_weights_only={out}")
    return 0


if __name__ == "__main__":
    run_command(main)
