"""Whether a tokenizer keeps the text: whether decoding its tokens returns what was encoded.

A tokenizer may normalise text (NFKC, lower case, fewer spaces), and have no token for a character:
it then writes its unknown token, or nothing. Unknown tokens are counted exactly, since they are
counted like all tokens (prepare.py). The rest shows only in the decoded text, which takes a sixth
of the time of encoding. So all documents of the first CHECK_ALL chunks are decoded, and then those
of every CHECK_EVERY-th.
"""

from typing import NamedTuple

import numpy as np

from data.tokenizer import Tokenizer

CHECK_ALL, CHECK_EVERY = 16, 8
SHOWN = 20  # characters of an example


class Kept(NamedTuple):
    """How many documents were decoded, how many of them differed, and the first difference."""

    checked: int = 0
    changed: int = 0
    example: tuple[str, str] | None = None  # a piece of the text, and what it became

    def __add__(self, other: "Kept") -> "Kept":  # type: ignore[override]
        changed, example = self.changed + other.changed, self.example or other.example
        return Kept(self.checked + other.checked, changed, example)


def kept(texts: list[str], ids: list[np.ndarray], tokenizer: Tokenizer) -> Kept:
    """Decodes and compares every text."""
    found = Kept()
    for text, tokens in zip(texts, ids, strict=True):
        decoded = tokenizer.decode(tokens)
        found += Kept(1) if decoded == text else Kept(1, 1, _difference(text, decoded))
    return found


def _difference(text: str, decoded: str) -> tuple[str, str]:
    pairs = enumerate(zip(text, decoded, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(text), len(decoded)))
    begin = max(0, at - SHOWN // 2)
    return text[begin : begin + SHOWN], decoded[begin : begin + SHOWN]
