"""What the files beside a tokenizer say about it: which tokens open and close a document."""

import json
from typing import Any

from errors import UserError

CONFIG = "tokenizer_config.json"
SAYS_ROLES = (CONFIG, "special_tokens_map.json")


def roles_of(files: dict[str, bytes], name: str) -> dict[str, str | None]:
    """bos_token and eos_token, as far as the files beside the tokenizer `name` state them. Raises
    UserError if two files state different ones."""
    found: dict[str, str | None] = {}
    for file in SAYS_ROLES:
        content = content_of(files, file, name)
        for role in {"bos_token", "eos_token"} & content.keys():
            token = content[role]
            token = token.get("content") if isinstance(token, dict) else token
            if found.setdefault(role, token) != token:
                why = f"tokenizer_config.json beside it names {found[role]!r} as {role}, "
                why += f"and {file} names {token!r}"
                raise UserError("tokenizer", name, why, "correct one of the two files")
    return found


def content_of(files: dict[str, bytes], file: str, name: str) -> dict[str, Any]:
    """The content of a JSON file beside the tokenizer `name`; {} if there is none."""
    try:
        content = json.loads(files.get(file, b"{}"))
    except (ValueError, RecursionError) as error:
        why = f"{file} beside it is not JSON: {error}"
        raise UserError("tokenizer", name, why, f"repair {file}, or remove it") from error
    return content if isinstance(content, dict) else {}
