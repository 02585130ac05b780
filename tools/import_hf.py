"""Converts a Hugging Face folder to a checkpoint: `python -m tools.import_hf --hf DIR --out DIR`

The --hf folder contains config.json, safetensors files and a tokenizer (else give --tokenizer). The
model is a Llama 2 to 3.2, a Mistral or Mixtral without a sliding window, or a Qwen3 or Qwen3-MoE.
Settings that Lattice's model does not support are refused by name (huggingface/config.py). Weights
keep their dtype, and are written in files of at most 5 GB, or of one larger tensor; one file is in
memory at a time.

--out becomes a checkpoint for checkpoint.load_weights_only, tools.generate, tools.verify and
tools.export. Its model.yaml is the `model` section for a configuration. The exit status is 2 if the
import is refused.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from costs.parameters import num_parameters
from data.tokenizer import GENERATION, Tokenizer
from model.config import ModelConfig
from runtime.checkpoint.manifest import read_manifest
from runtime.trainer_state import model_entries
from tools.command import CommandParser, reports_errors, run_command
from tools.huggingface.agreement import generation_config
from tools.huggingface.config import refuse_foreign
from tools.huggingface.folder_reader import FolderReader
from tools.huggingface.new_folder import FILE_BYTES, refuse_existing, write_weights

NEXT = """\
to continue training it, copy the section in {out}/model.yaml to a configuration, such as \
configs/mine.yaml, and run
  python -m tools.prepare --source 'corpus/*.jsonl' --tokenizer {out} --out prepared/mine
  python -m tools.launch --nproc-per-node 8 configs/mine.yaml data.path=prepared/mine \\
      checkpoint.load_weights_only={out}"""


def import_hf(
    hf: Path, out: Path, file_bytes: int = FILE_BYTES, tokenizer_path: Path | None = None
) -> ModelConfig:
    """Writes the checkpoint `out`, completely or not at all. Raises UserError for what the user can
    fix.

    tokenizer_path: a tokenizer's file or folder; None: the one in `hf`.
    """
    refuse_existing(out)
    refuse_foreign(hf, "--hf")
    reader = FolderReader(hf)
    tokenizer = Tokenizer.load(tokenizer_path or hf, "--tokenizer", check_beside=True)
    generation = generation_config(hf, tokenizer, reader.model.vocab_size)
    files = {
        **tokenizer.files,
        GENERATION: json.dumps(generation, indent=2).encode(),
        "model.yaml": yaml.safe_dump({"model": said(reader.model)}, sort_keys=False).encode(),
    }
    trainer = {
        "seed": 0,
        "seq_len": reader.max_length,
        "model": model_entries(reader.model),
        "data": {"checksum": "imported", "next_sample": 0, "skipped": []},
    }
    task = f"importing {out.name}"
    write_weights(out, reader.tensors, reader.weight, files, trainer, file_bytes, task)
    return reader.model


def said(section: Any) -> dict[str, Any]:
    """The keys of the section `model` whose values are not the defaults, with router_aux_weight,
    which a checkpoint does not store."""
    found = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if value != field.default:
            found[field.name] = said(value) if dataclasses.is_dataclass(value) else value
    return found


@reports_errors
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m tools.import_hf", description=__doc__)
    parser.required("--hf", Path, "DIR", "the folder in Hugging Face format")
    parser.required("--out", Path, "DIR", "the checkpoint to write, which must not exist yet")
    parser.option("--tokenizer", Path, "PATH", "the model's tokenizer (default: the one in --hf)")
    options = parser.parse_args(arguments)
    out = options.out
    model = import_hf(options.hf, out, tokenizer_path=options.tokenizer)
    size = read_manifest(out).num_bytes
    print(f"{out}: {num_parameters(model):,} parameters, {size:,} bytes")
    print(NEXT.format(out=out))


if __name__ == "__main__":
    run_command(main)
