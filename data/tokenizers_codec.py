"""Reads Hugging Face's `tokenizer.json` with their `tokenizers` library
(https://huggingface.co/docs/tokenizers).

The file defines how text becomes ids and which tokens are special, but not which of them open and
close a document: that is in `tokenizer_config.json` or `special_tokens_map.json` in the same
folder. If neither exists, the tokens are found by well-known names.
"""

import hashlib
import json
from typing import Any

import numpy as np

from data.foreign_tokenizers import not_a_tokenizer
from errors import UserError

SAYS_ROLES = ("tokenizer_config.json", "special_tokens_map.json")
# Names used by Llama 3; Llama 2 and Mistral; Gemma; GPT-2 and Qwen. The first one that the file
# marks as special is taken.
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")


class TokenizersCodec:
    """One tokenizer.json. bos_id is −1 if no special token opens a document (Qwen).

    sha256 covers the file and the ids of bos and eos, so that accompanying files for other tools (a
    chat template) may change.

    Args:
        files: name → content, tokenizer.json first.
        name: its name in error messages (its path).

    Raises UserError if this is not a tokenizer.json, or if no file names the token that closes a
    document.
    """

    def __init__(self, files: dict[str, bytes], name: str) -> None:
        import tokenizers  # imported here: not needed to read SentencePiece models

        content = files["tokenizer.json"]
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            raise not_a_tokenizer(
                name, content, f"this is not a readable tokenizer.json: {error}"
            ) from error
        self._tokenizer.no_truncation()  # some files contain settings left over from training
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # special tokens in a text are ordinary text
        # Includes added tokens; the largest id counts, because ids may have gaps.
        self.vocab_size: int = (
            max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {token.content: token_id for token_id, token in added if token.special}
        roles = _roles(files, name)
        self.bos_id = self._find("bos_token", roles, BOS_NAMES, special, name)
        self.eos_id = self._find("eos_token", roles, EOS_NAMES, special, name)
        if self.eos_id < 0:
            remedy = 'put its tokenizer_config.json, with "eos_token", in the same folder'
            raise UserError(
                "tokenizer", name, "no file names the token that ends documents", remedy
            )
        probe = self._tokenizer.encode("a").ids  # including tokens added by its post-processor
        self.adds_bos = bool(probe) and probe[0] == self.bos_id
        self.sha256 = hashlib.sha256(
            content + f"\n{self.bos_id} {self.eos_id}".encode()
        ).hexdigest()

    def _find(
        self,
        role: str,
        roles: dict[str, Any],
        names: tuple[str, ...],
        special: dict[str, int],
        file: str,
    ) -> int:
        """The id of the token with this role; −1 if there is none."""
        if not roles:
            return next((special[name] for name in names if name in special), -1)
        token = roles.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            return -1
        found = self._tokenizer.token_to_id(content) if isinstance(content, str) else None
        if found is None:
            why = f"it has no token {content!r}, which the file beside it names as {role}"
            raise UserError("tokenizer", file, why, "use two files of the same tokenizer")
        return found

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, as int32 arrays, without bos and eos; runs on one thread."""
        return [
            np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
            for text in texts
        ]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; special tokens give no text, and invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _roles(files: dict[str, bytes], name: str) -> dict[str, Any]:
    """The content of the first file in SAYS_ROLES that has "eos_token"; else {}. The values of
    bos_token and eos_token are str, dict or None."""
    for file in SAYS_ROLES:
        if file in files:
            try:
                content = json.loads(files[file])
            except ValueError as error:
                why = f"{file} beside it is not JSON: {error}"
                raise UserError("tokenizer", name, why, f"repair {file}, or remove it") from error
            if isinstance(content, dict) and "eos_token" in content:
                return content
    return {}
