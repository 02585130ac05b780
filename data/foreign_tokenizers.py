"""Recognizes tokenizers in unsupported formats, so that no intact file is reported as damaged."""

import json
import re
from pathlib import Path
from typing import Any

from data.contents import known
from errors import UserError

GIVE_JSON = "give the tokenizer.json of the same model, from its folder in Hugging Face format"
CONVERT = (
    'python -c "from transformers import AutoTokenizer as A; '
    'A.from_pretrained({0!r}).save_pretrained({1!r})"'
)


def not_a_tokenizer(name: str, content: bytes, otherwise: str) -> UserError:
    """The error for a file that neither library reads. otherwise: the reason to give if the format
    is not recognized."""
    why, remedy = _known(content) or (
        otherwise,
        "give a SentencePiece model, such as `python -m tools.tokenizer` writes, "
        "or a tokenizer.json",
    )
    return UserError("tokenizer", name, why, remedy)


def no_tokenizer_in(folder: Path) -> UserError:
    """The error for a folder with neither tokenizer.model nor tokenizer.json."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    # Mistral's names for SentencePiece models
    versions = [name for name in names if re.fullmatch(r"tokenizer\.model\.v\d+", name)]
    if versions:
        why = f"its tokenizer has another name ({versions[-1]})"
        remedy = f"name the file: {folder / versions[-1]}"
    elif "tekken.json" in names:
        why = "it has only a tekken.json, Mistral's own format, which is not supported"
        remedy = GIVE_JSON
    elif {"vocab.json", "merges.txt"} <= set(names):
        why = "it has vocab.json and merges.txt, an older format, which is not supported"
        remedy = (
            "with transformers installed, convert it to a tokenizer.json: "
            f"`{CONVERT.format(str(folder), f'{folder}-tokenizer')}`, and give that folder"
        )
    else:
        why = "it contains neither tokenizer.model nor tokenizer.json"
        remedy = (
            "give the path of the tokenizer file, or copy the file there; "
            "or train one: `python -m tools.tokenizer`"
        )
    return UserError("tokenizer", str(folder), why, remedy)


def _known(content: bytes) -> tuple[str, str] | None:
    """What this content is, and what to give instead; None if the format is not recognized."""
    if found := known(content):
        return f"this is {found[0]}", found[1]
    if content.startswith(b"GGUF"):
        return "this is a GGUF model, which is not supported", GIVE_JSON
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n[A-Za-z0-9+/]+=* \d+\r?\n", content):
        return (
            "this is a vocabulary for tiktoken (Llama 3's own tokenizer.model), "
            "which is not supported",
            GIVE_JSON,
        )
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if isinstance(found.get("vocab"), list) and isinstance(found.get("config"), dict):
        return "this is Mistral's tekken format, which is not supported", GIVE_JSON
    if "tokenizer_class" in found or "architectures" in found:
        why = "this is a description of a tokenizer or a model, not a tokenizer"
        return why, "give the tokenizer.json in the same folder"
    if found and all(type(value) is int for value in found.values()):
        return "this is a vocabulary without its merges (vocab.json)", GIVE_JSON
    return None
