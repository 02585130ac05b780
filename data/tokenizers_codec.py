"""Reads Hugging Face's `tokenizer.json` with their `tokenizers` library
(https://huggingface.co/docs/tokenizers).

The file defines how text becomes ids and which tokens are special, but not which of them open and
close a document: that is in `tokenizer_config.json` or `special_tokens_map.json` in the same
folder. If neither exists, the tokens are found by well-known names.

A text cannot contain a control token. The library has an option for that
(`encode_special_tokens`), but it covers only the search for added tokens: a model whose vocabulary
contains the control tokens, as a Unigram's does, finds `</s>` in a text by itself. So texts are
encoded by a copy of the tokenizer in which these tokens have random names, which no text contains.
"""

import hashlib
import json
import secrets
from typing import Any

import numpy as np

from data.token_roles import GIVE_JSON, not_a_tokenizer, roles_of
from errors import UserError

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
        content = files["tokenizer.json"]
        self._tokenizer = parse(content, name)
        self._tokenizer.no_truncation()  # some files contain settings left over from training
        self._tokenizer.no_padding()
        self._name = name
        # Includes added tokens; the largest id counts, because ids may have gaps.
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids, default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: token.special for token in added.values()}
        self.starts_with_space = False
        self.roles = roles = roles_of(files, name)
        if "eos_token" not in roles:
            known = {"bos_token": BOS_NAMES, "eos_token": EOS_NAMES}
            for role, names in known.items():
                roles[role] = next((each for each in names if special.get(each)), None)
        self.bos_id = self._find("bos_token")
        self.eos_id = self._find("eos_token")
        if self.eos_id < 0:
            remedy = 'put its tokenizer_config.json, with "eos_token", in the same folder'
            why = "no file names the token that ends documents"
            raise UserError("tokenizer", name, why, remedy)
        probe = self._tokenizer.encode("a").ids  # including tokens added by its post-processor
        self.adds_bos = bool(probe) and probe[0] == self.bos_id
        parsed = json.loads(content)
        self.unk_id = _unknown(parsed["model"], self._tokenizer)
        self._ends = {self.bos_id, self.eos_id} - {-1}  # special or not, added or not
        control = {t.content: i for i, t in added.items() if t.special}
        control |= {self._tokenizer.id_to_token(i): i for i in self._ends}
        # the token for what has no other is not structure, unless it also opens or closes documents
        self.control_ids = sorted({*control.values()} - ({self.unk_id} - self._ends))
        kept_out = set(control)
        if self.unk_id >= 0:
            kept_out.add(self._tokenizer.id_to_token(self.unk_id))
        try:
            self._encoder = _for_texts(self._tokenizer, parsed, kept_out)
        except Exception as error:
            why = f"its control tokens cannot be kept apart from text: {error}"
            raise UserError("tokenizer", name, why, GIVE_JSON) from error
        decides = content + f"\n{self.bos_id} {self.eos_id}".encode()
        self.sha256 = hashlib.sha256(decides).hexdigest()

    def _find(self, role: str) -> int:
        """The id of the token with this role; −1 if there is none."""
        token = self.roles.get(role)
        if token is None:
            return -1
        found = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            why = f"it has no token {token!r}, which the file beside it names as {role}"
            raise UserError("tokenizer", self._name, why, "use two files of the same tokenizer")
        return found

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, as int32 arrays, without bos and eos; runs on one thread. Raises
        UserError if the tokenizer has no token for a text."""
        try:
            encodings = [self._encoder.encode(text, add_special_tokens=False) for text in texts]
        except MemoryError:
            raise
        except Exception as error:  # the library raises nothing narrower
            why = f"it cannot encode a text: {error}"
            raise UserError("tokenizer", self._name, why, GIVE_JSON) from error
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; special tokens, bos and eos give no text, and invalid UTF-8 becomes
        U+FFFD."""
        ids = [token for token in ids if token not in self._ends]
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def parse(content: bytes, name: str) -> Any:
    """The library's tokenizer. Raises UserError if this is no tokenizer.json that it reads."""
    import tokenizers  # imported here: not needed to read SentencePiece models

    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing narrower
        why = f"this is not a readable tokenizer.json: {error}"
        raise not_a_tokenizer(name, content, why) from error


def _unknown(model: dict[str, Any], tokenizer: Any) -> int:
    """The id of the token for what the vocabulary cannot spell; −1 if there is none."""
    token = model.get("unk_token", model.get("unk_id"))  # Unigram has the id
    found = tokenizer.token_to_id(token) if isinstance(token, str) else token
    return -1 if found is None else found


def _for_texts(tokenizer: Any, parsed: dict[str, Any], control: set[str]) -> Any:
    """The tokenizer with which texts are encoded: the same ids, but no text has a token of
    `control`, by name. Changes `parsed`, the content of tokenizer.json."""
    import tokenizers

    model = parsed["model"]
    in_model = {name for name in control if tokenizer.model.token_to_id(name) is not None}
    not_special = {t["content"] for t in parsed["added_tokens"] if not t["special"]}
    names = in_model | not_special.intersection(control)
    if names:
        new = {name: secrets.token_hex(16) for name in names}
        for token in parsed["added_tokens"]:
            if token["content"] in new:
                token |= {"content": new[token["content"]], "normalized": False, "special": True}
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {new.get(piece, piece): token for piece, token in vocab.items()}
        else:
            model["vocab"] = [[new.get(piece, piece), score] for piece, score in vocab]
        if model.get("unk_token") is not None:
            model["unk_token"] = new.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names]
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    tokenizer.no_truncation()  # some files contain settings left over from training
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer
