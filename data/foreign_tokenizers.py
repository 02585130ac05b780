"""Recognizes tokenizers in unsupported formats, so that no intact file is reported as damaged."""

import re

from data.contents import known
from errors import UserError

GIVE_JSON = "give the tokenizer.json of the same model, from its folder in Hugging Face format"
# beginning of the content → format
_FORMATS = {
    rb"GGUF": "a GGUF model",
    rb"[A-Za-z0-9+/]+=* \d+\r?\n[A-Za-z0-9+/]+=* \d+\r?\n": (
        "a vocabulary for tiktoken (Llama 3's own tokenizer.model)"
    ),
    rb'(?s:\s*\{\s*"config"\s*:\s*\{.*"vocab"\s*:\s*\[)': "in Mistral's tekken format",
}


def not_a_tokenizer(name: str, content: bytes, otherwise: str) -> UserError:
    """The error for a file that neither library reads. otherwise: the reason to give if the format
    is not recognized."""
    why, remedy = otherwise, f"{GIVE_JSON}, or a SentencePiece model with bos and eos"
    if found := known(content):
        why, remedy = f"this is {found[0]}", found[1]
    for start, what in _FORMATS.items():
        if re.match(start, content):
            why = f"this is {what}, which is not supported"
    return UserError("tokenizer", name, why, remedy)
