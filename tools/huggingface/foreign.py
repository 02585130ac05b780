"""Recognizes models that are missing or not in Hugging Face format, for a precise message."""

import re
from pathlib import Path

from errors import UserError
from tools.huggingface.config import CONFIG

SAFETENSORS = "give a folder with the same model's config.json and *.safetensors"


def refuse_foreign(folder: Path, key: str) -> None:
    """Raises UserError with this key if `folder` is not a folder, or has weights only in an
    unsupported format."""
    if folder.is_file():
        with folder.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF" or folder.suffix == ".gguf"
        why = "it is a file, not a folder"
        if is_gguf:
            why = "it is a GGUF file, a format that is not supported"
        raise UserError(key, str(folder), why, SAFETENSORS)
    if not folder.is_dir():
        why, remedy = "there is no such folder", "check the path"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) and not folder.parent.exists():
            why += " here, and nothing is downloaded from the Hugging Face hub"
            remedy = (
                f"download it: `hf download {folder} --local-dir {folder.name}`, "
                f"and give {key} {folder.name}"
            )
        raise UserError(key, str(folder), why, remedy)
    names = {path.name for path in folder.iterdir()}
    if CONFIG in names:
        return
    if any(name.endswith(".gguf") for name in names):
        why = "it contains a model in GGUF format, which is not supported"
        raise UserError(key, str(folder), why, SAFETENSORS)
    if "params.json" in names and any(name.startswith("consolidated") for name in names):
        why = (
            "it contains a model in its publisher's own format (params.json, consolidated.*), "
            "which is not supported"
        )
        raise UserError(key, str(folder), why, SAFETENSORS)
