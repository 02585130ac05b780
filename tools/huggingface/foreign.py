"""Models that are not in Hugging Face's format, or not here at all: each is called what it is."""

import re
from pathlib import Path

from errors import UserError
from tools.huggingface.config import CONFIG

SAFETENSORS = "give a folder with the same model's config.json and *.safetensors"


def refuse_foreign(folder: Path, key: str) -> None:
    """Raises UserError, naming `key`, where `folder` is no folder, or holds weights only in a
    format that is not read here."""
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
        why = "it holds a model in the format GGUF, which is not supported"
        raise UserError(key, str(folder), why, SAFETENSORS)
    if "params.json" in names and any(name.startswith("consolidated") for name in names):
        why = (
            "it holds a model in its makers' own format (params.json, consolidated.*), "
            "which is not supported"
        )
        raise UserError(key, str(folder), why, SAFETENSORS)
