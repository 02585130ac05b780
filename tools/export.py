"""Exports a checkpoint for Hugging Face: `python -m tools.export --checkpoint DIR --out DIR`

--checkpoint is a checkpoint of any layout, or a run folder, whose newest checkpoint is used. It
writes config.json, generation_config.json, safetensors files of at most 5 GB with an index, and the
tokenizer's files, which transformers, vLLM and similar programs load. The architecture is Llama, or
Qwen3 for a model with norms of queries and keys, or Mistral if the number of heads does not divide
the width, which transformers' Llama rejects (huggingface/config.py); with experts it is Mixtral or
Qwen3-MoE (huggingface/experts.py). The checkpoint's checksums are verified first. Only one file's
tensors are in memory at a time. The exit status is 2 if the export is refused.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.tokenizer import GENERATION, JSON, MODEL, Tokenizer
from tools.command import CommandParser, at_least, reports_errors, run_command
from tools.huggingface.agreement import IDS, generation_config
from tools.huggingface.checkpoint_reader import CheckpointReader, newest
from tools.huggingface.config import CONFIG, Parameter, config_json, option_named, parameters
from tools.huggingface.new_folder import new_folder, refuse_existing
from tools.huggingface.tensor_files import FILE_BYTES, INDEX, Piece, write_files
from tools.huggingface.tokenizer import huggingface_files
from training.precision import DTYPES


def export(
    checkpoint: Path,
    out: Path,
    dtype: str = "float32",
    file_bytes: int = FILE_BYTES,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Writes `out`, whole or not at all, and returns its config.json.

    Args:
        dtype: `float32`, or `bfloat16`, to which weights are rounded.
        file_bytes: the most bytes of tensors in a file, except for a single larger tensor.
        max_length: the longest sequence, in tokens, to state in config.json; None: the sequence
            length of its training.

    Raises UserError for what the user can fix.
    """
    refuse_existing(out)
    at_least(1, file_bytes=file_bytes, max_length=max_length)
    reader = CheckpointReader(checkpoint, verified=True)
    tokenizer = Tokenizer.load(checkpoint)
    wanted = parameters(reader.model)
    reader.require({p.ours: p.our_shape for p in wanted})
    max_length = max_length or reader.trainer.seq_len
    with option_named():
        generation = generation_config(checkpoint, tokenizer, reader.model.vocab_size)
    config = config_json(reader.model, dtype=dtype, max_length=max_length)
    config |= {key: generation.get(key) for key in IDS}

    size = DTYPES[dtype].itemsize
    pieces = [
        Piece(p.theirs, math.prod(p.shape) * size, partial(_load, reader, p, DTYPES[dtype]))
        for p in wanted
    ]
    with new_folder(out) as folder:
        task = f"exporting {out.name}"
        plan = write_files(folder, pieces, file_bytes, lambda tensors: {"format": "pt"}, task)
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            _write(folder / INDEX, index)
        for name, content in huggingface_files(tokenizer, max_length).items():
            (folder / name).write_bytes(content)
        _write(folder / CONFIG, config)
        _write(folder / GENERATION, generation)
    if (
        config["model_type"] == "qwen3"
        and MODEL in tokenizer.files
        and not tokenizer.starts_with_space
    ):
        print(
            "llama.cpp's converter would put a space before every text of a Qwen3 with this "
            "tokenizer: run llama.cpp with --override-kv tokenizer.ggml.add_space_prefix=bool:false"
        )
    return config


def _load(reader: CheckpointReader, wanted: Parameter, dtype: torch.dtype) -> torch.Tensor:
    return reader.weight(wanted.ours, wanted.expert).to(dtype)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.export", description=__doc__)
    parser.required("--checkpoint", Path, "DIR", "a checkpoint, or a run folder")
    parser.required("--out", Path, "DIR", "the folder to write, which must not exist yet")
    parser.option("--dtype", "float32", None, "of the weights", choices=("float32", "bfloat16"))
    parser.option("--file-bytes", FILE_BYTES, "N", "the most bytes of tensors in one file")
    length = "max_position_embeddings (default: the sequence length of its training)"
    parser.option("--max-length", int, "N", length)
    options = parser.parse_args(arguments)
    checkpoint = newest(options.checkpoint)
    config = export(checkpoint, options.out, options.dtype, options.file_bytes, options.max_length)
    files = sorted(options.out.iterdir())
    size = sum(file.stat().st_size for file in files)
    print(
        f"{options.out}: {config['architectures'][0]} of {checkpoint}, {size:,} bytes: "
        f"{', '.join(f.name for f in files)}"
    )
    if not (options.out / JSON).exists():
        print(
            "no tokenizer.json was written: it could not reproduce this SentencePiece model exactly"
        )
    return 0


if __name__ == "__main__":
    run_command(main)
