"""What a tokenizer's files say: which tokens open and close a document, by the files beside it; and
why a file is no tokenizer."""

import json
from collections.abc import Iterator
from typing import Any

from data.contents import pointer
from errors import UserError

GIVE_JSON = "give the tokenizer.json of the same model, from its folder in Hugging Face format"
CONFIG = "tokenizer_config.json"
SAYS_ROLES = (CONFIG, "special_tokens_map.json")


def roles_of(files: dict[str, bytes], name: str) -> dict[str, str | None]:
    """bos_token and eos_token, as far as the files beside the tokenizer `name` state them; None:
    there is none."""
    found: dict[str, str | None] = {}
    for _, role, token in _stated(files, name):
        found[role] = found.get(role) or token
    return found


def check_roles(files: dict[str, bytes], name: str, used: dict[str, str | None]) -> None:
    """Raises UserError if a file beside the tokenizer `name` names another token than is `used`."""
    remedy = "give a copy of these files in which that is corrected, or of the tokenizer's file "
    remedy += "alone, under another name"
    for file, role, token in _stated(files, name):
        if token not in (None, used.get(role)):
            why = f"its {role} is {used.get(role)!r}, and {file} beside it names {token!r}"
            raise UserError("tokenizer", name, why, remedy)


def _stated(files: dict[str, bytes], name: str) -> Iterator[tuple[str, str, Any]]:
    """(file, role, token or None) of each statement; "" is none (LLaMA 1's)."""
    for file in SAYS_ROLES:
        content = content_of(files, file, name)
        for role in ("bos_token", "eos_token"):
            token = content.get(role, "")
            token = token.get("content") if isinstance(token, dict) else token
            if token != "":
                yield file, role, token
        if "added_tokens_decoder" in content:  # transformers then reads no other file
            return


def content_of(files: dict[str, bytes], file: str, name: str) -> dict[str, Any]:
    """The content of a JSON file beside the tokenizer `name`; {} if there is none."""
    try:
        content = json.loads(files.get(file, b"{}"))
    except (ValueError, RecursionError) as error:
        why = f"{file} beside it is not JSON: {error}"
        raise UserError("tokenizer", name, why, f"repair {file}, or remove it") from error
    return content if isinstance(content, dict) else {}


def not_a_tokenizer(name: str, content: bytes, why: str) -> UserError:
    """The error for a file that its library does not read."""
    remedy = f"{GIVE_JSON}, or a SentencePiece model with bos and eos"
    if found := pointer(content):
        why, remedy = f"this is {found[0]}", found[1]
    return UserError("tokenizer", name, why, remedy)
