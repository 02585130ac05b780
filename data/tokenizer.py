"""Text to token ids and back. Which library does it depends on the file.

    tokenizer.model   SentencePiece    data/sentencepiece_codec.py   ours, and Llama 2's
    tokenizer.json    tokenizers       data/tokenizers_codec.py      Llama 3's, Qwen's, most others'

Where both lie in a folder (Llama 2, Mistral), it is the first: what the model was trained with.
Prepared data and checkpoints take along what decides the ids, and what Hugging Face's tools want to
find beside it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from data.foreign_tokenizers import no_tokenizer_in
from data.sentencepiece_codec import SentencePieceCodec, train_sentencepiece
from data.tokenizers_codec import TokenizersCodec
from errors import UserError

MODEL, JSON = "tokenizer.model", "tokenizer.json"
# what belongs to either
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Codec(Protocol):
    """What a library does. Texts are str without lone surrogates, ids are in range(vocab_size)."""

    # of all that decides which ids a text has, and which token opens and closes a document
    sha256: str
    vocab_size: int
    bos_id: int  # negative: none
    eos_id: int
    adds_bos: bool  # whether a text that a model continues begins with bos, as far as the file says

    def encode(self, texts: list[str]) -> list[np.ndarray]: ...

    def decode(self, ids: list[int]) -> str: ...


class Tokenizer:
    """Text to ids in range(vocab_size), and back. eos closes a document; bos, if any, opens it.

    adds_bos: whether bos opens a prompt too: what tokenizer_config.json says (`add_bos_token`),
    else what the file itself does.

    A text that spells a special token (`<|end_of_text|>`, `</s>`) is text: no document can close
    itself.

    Args:
        files: name → content, in this order: tokenizer.model or tokenizer.json, and what belongs to
            it.
        name: how messages call it (its path).

    Raises UserError when the first file is not what its name says, or has no token to close a
    document with.
    """

    def __init__(self, files: dict[str, bytes], name: str = "tokenizer") -> None:
        self.files = files
        is_json = next(iter(files)) == JSON
        self._codec: Codec = (
            TokenizersCodec(files, name) if is_json else SentencePieceCodec(self.model, name)
        )
        self.sha256, self.vocab_size = self._codec.sha256, self._codec.vocab_size
        self.bos_id, self.eos_id = self._codec.bos_id, self._codec.eos_id
        said = _add_bos_token(files)
        self.adds_bos = self.bos_id >= 0 and (self._codec.adds_bos if said is None else said)

    @classmethod
    def load(cls, path: str | Path, key: str = "tokenizer") -> "Tokenizer":
        """The tokenizer stored at `path`: a file, or a folder that holds one.
        Raises UserError, naming `key`, when there is none."""
        try:
            files = tokenizer_files(Path(path)).items()
            return cls({name: file.read_bytes() for name, file in files}, str(path))
        except UserError as error:
            raise UserError(key, error.value, error.why, error.remedy) from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """A SentencePiece tokenizer trained on `texts`: see `train_sentencepiece`."""
        return cls({MODEL: train_sentencepiece((clean(text) for text in texts), vocab_size)})

    @property
    def model(self) -> bytes:
        """The content of its tokenizer.model, or tokenizer.json."""
        return next(iter(self.files.values()))

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without bos and eos."""
        return self.encode_arrays([text])[0].tolist()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """`encode` of each, as int32 arrays; on one thread: preparation has a process per core."""
        return self._codec.encode([clean(text) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. bos and eos are silent, and so is what a model with a padded
        vocabulary may draw beyond vocab_size; bytes that are no UTF-8 become U+FFFD."""
        return self._codec.decode([int(token) for token in ids if token < self.vocab_size])


def tokenizer_files(path: Path) -> dict[str, Path]:
    """The files of the tokenizer at `path`, a file or a folder: their names wherever they are
    copied to → where they are now. Raises UserError when there is none.

    A file is known by its content, and has others beside it only where it bears its standard name.
    """
    if path.is_dir():
        found = [path / name for name in (MODEL, JSON) if (path / name).is_file()]
        if not found:
            raise no_tokenizer_in(path)
        path = found[0]
    try:
        with open(path, "rb") as file:
            is_json = file.read(64).lstrip().startswith(b"{")
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        remedy = "train one: `python -m tools.tokenizer`"
        raise UserError("tokenizer", str(path), why, remedy) from error
    name = JSON if is_json else MODEL
    beside = (*BESIDE, *([] if is_json else [JSON])) if path.name == name else ()
    return {name: path} | {
        other: path.with_name(other) for other in beside if path.with_name(other).is_file()
    }


def _add_bos_token(files: dict[str, bytes]) -> bool | None:
    """What tokenizer_config.json says of bos; None: nothing."""
    try:
        content = json.loads(files.get("tokenizer_config.json", b"{}"))
    except ValueError:
        return None
    said = content.get("add_bos_token") if isinstance(content, dict) else None
    return said if isinstance(said, bool) else None


def clean(text: str) -> str:
    """`text` with lone surrogates, which are no text (UTF-8 cannot carry them), replaced by U+FFFD.

    JSON can smuggle them in ("\\ud800"), and one of them would stop a preparation of days.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
