"""Exports a checkpoint for Hugging Face: `python -m tools.export --checkpoint DIR --out DIR`

--checkpoint is a checkpoint of any layout, or a run folder, whose newest checkpoint is used. It
writes config.json, generation_config.json, safetensors files of at most 5 GB with an index, and the
tokenizer's files, which transformers, vLLM and similar programs load. The architecture is Llama, or
Qwen3 for a model with norms of queries and keys, or Mistral if the number of heads does not divide
the width, which transformers' Llama rejects (huggingface/config.py); with experts it is Mixtral or
Qwen3-MoE. The checkpoint's checksums are verified first. Only one file's tensors are in memory at a
time. The exit status is 2 if the export is refused.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from data.tokenizer import GENERATION, JSON, MODEL, Tokenizer
from tools.command import CommandParser, reports_errors, run_command
from tools.huggingface.agreement import IDS, generation_config
from tools.huggingface.checkpoint_reader import DTYPES, CheckpointReader, newest
from tools.huggingface.config import CONFIG, config_json, parameters
from tools.huggingface.folder_reader import INDEX
from tools.huggingface.new_folder import FILE_BYTES, new_folder, refuse_existing, write_files
from tools.huggingface.tokenizer import huggingface_files

CODES = {"float32": "F32", "bfloat16": "BF16"}


def export(
    checkpoint: Path, out: Path, dtype: str = "float32", file_bytes: int = FILE_BYTES
) -> dict[str, Any]:
    """Writes `out`, whole or not at all, and returns its config.json.

    Args:
        dtype: `float32`, or `bfloat16`, to which weights are rounded.
        file_bytes: the most bytes of tensors in a file, except for a single larger tensor.

    Raises UserError for what the user can fix.
    """
    refuse_existing(out)
    reader = CheckpointReader(checkpoint)
    wanted = {each.theirs: each for each in parameters(reader.model)}
    reader.check_model()
    tokenizer = Tokenizer.load(checkpoint)
    num_rows = reader.model.vocab_size
    generation = generation_config(checkpoint, tokenizer, num_rows, "--checkpoint")
    config = config_json(reader.model, dtype=dtype, max_length=reader.max_length)
    config |= {key: generation.get(key) for key in IDS}
    code = CODES[dtype]

    def load(theirs: str) -> Tensor:
        return reader.weight(wanted[theirs].ours, wanted[theirs].expert).to(DTYPES[code])

    tensors = {theirs: (code, each.shape) for theirs, each in wanted.items()}
    with new_folder(out) as folder:
        task = f"exporting {out.name}"
        plan = write_files(folder, tensors, load, file_bytes, task, is_checkpoint=False)
        written = {CONFIG: config, GENERATION: generation}
        if plan.is_sharded:
            written[INDEX] = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        files = huggingface_files(tokenizer, reader.max_length)
        for name, content in written.items():
            files[name] = (json.dumps(content, indent=2) + "\n").encode()
        for name, file in files.items():
            (folder / name).write_bytes(file)
    adds_space = MODEL not in tokenizer.files or tokenizer.starts_with_space
    if config["model_type"] == "qwen3" and not adds_space:
        print(
            "llama.cpp's converter would put a space before every text of a Qwen3 with this "
            "tokenizer: run llama.cpp with --override-kv tokenizer.ggml.add_space_prefix=bool:false"
        )
    return config


@reports_errors
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m tools.export", description=__doc__)
    parser.required("--checkpoint", Path, "DIR", "a checkpoint, or a run folder")
    parser.required("--out", Path, "DIR", "the folder to write, which must not exist yet")
    parser.option("--dtype", "float32", None, "of the weights", choices=CODES)
    options = parser.parse_args(arguments)
    checkpoint = newest(options.checkpoint)
    config = export(checkpoint, options.out, options.dtype)
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


if __name__ == "__main__":
    run_command(main)
