"""Converts text to token ids and back. The library used depends on the file.

    tokenizer.model   SentencePiece    data/sentencepiece_codec.py   ours, and Llama 2's
    tokenizer.json    tokenizers       data/tokenizers_codec.py      Llama 3's, Qwen's, most others'

If a folder has both (Llama 2, Mistral), tokenizer.model is used: the model was trained with it.
Prepared data and checkpoints contain a copy of the files that determine the ids, and of those that
Hugging Face's tools expect in the same folder, among them generation_config.json, which says where
generation stops.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data.sentencepiece_codec import SentencePieceCodec, train_sentencepiece
from data.token_ids import JSON, MODEL, check_tokens
from data.token_roles import CONFIG, GIVE_JSON, SAYS_ROLES, check_roles, content_of
from data.tokenizers_codec import TokenizersCodec
from errors import UserError, is_file, raise_passing

GENERATION = "generation_config.json"
# files that accompany either of them
BESIDE = (*SAYS_ROLES, "added_tokens.json", "chat_template.jinja", GENERATION)


class Tokenizer:
    """Converts text to ids in range(vocab_size), and back. eos closes a document; bos, if any,
    opens it.

    adds_bos: whether bos opens a prompt too: `add_bos_token` in tokenizer_config.json decides, else
    the tokenizer file itself.

    Text that spells a control token (`<|end_of_text|>`, `</s>`) is encoded as ordinary text, so
    that a document's text cannot close the document. (Tokens that were added for texts, such as
    `<think>`, are found in them.)

    Args:
        files: name → content, first tokenizer.model or tokenizer.json, then the files that
            accompany it.
        name: its name in error messages (its path).

    Raises UserError if the first file does not have the format of its name or has no token that
    closes a document.
    """

    def __init__(self, files: dict[str, bytes], name: str = "tokenizer") -> None:
        self.files = files
        codec = TokenizersCodec if next(iter(files)) == JSON else SentencePieceCodec
        self._codec = codec(files, name)
        # covers all that determines a text's ids and the tokens that open and close a document
        self.sha256: str = self._codec.sha256
        self.vocab_size: int = self._codec.vocab_size
        self.bos_id: int = self._codec.bos_id  # negative: none
        self.eos_id: int = self._codec.eos_id
        self.unk_id: int = self._codec.unk_id  # for what has no other token; negative: none
        # no text has these: bos, eos, and other tokens of structure
        self.control_ids: list[int] = self._codec.control_ids
        # whether a SentencePiece model puts a space before every text
        self.starts_with_space: bool = self._codec.starts_with_space
        said = content_of(files, CONFIG, name).get("add_bos_token")
        said = said if isinstance(said, bool) else self._codec.adds_bos
        self.adds_bos = self.bos_id >= 0 and said

    @classmethod
    def load(
        cls,
        path: str | Path,
        key: str = "tokenizer",
        check_beside: bool = False,
        check_ids: bool = False,
    ) -> "Tokenizer":
        """Loads the tokenizer at `path`: a file, or a folder that contains one.
        Raises UserError with this `key` if there is none.

        check_beside: refuse accompanying files that contradict it: other tokens as bos or eos,
        and what `check_ids` refuses. Where a tokenizer is chosen, but not that of a run or
        checkpoint, which can no longer choose.
        check_ids: refuse files with other ids, or tokens of texts that it would spell. Where it
        comes from elsewhere.
        """
        try:
            files = tokenizer_files(Path(path)).items()
            loaded = cls({name: file.read_bytes() for name, file in files}, str(path))
            if check_beside:
                check_roles(loaded.files, str(path), loaded._codec.roles)
            if check_beside or check_ids:
                check_tokens(loaded.files, str(path))
        except UserError as error:
            raise UserError(key, error.value, error.why, error.remedy) from error
        return loaded

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Trains a SentencePiece tokenizer on `texts`: see `train_sentencepiece`."""
        return cls({MODEL: train_sentencepiece((clean(text) for text in texts), vocab_size)})

    @property
    def model(self) -> bytes:
        """The content of its tokenizer.model or tokenizer.json."""
        return next(iter(self.files.values()))

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without bos and eos."""
        return self.encode_arrays([text])[0].tolist()

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, without bos and eos, as int32 arrays. Runs on one thread, because
        data preparation has one process per core. Raises UserError if a text has no ids."""
        return self._codec.encode([clean(text) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. bos and eos give no text, nor do ids >= vocab_size, which a model with
        a padded vocabulary may sample. Invalid UTF-8 becomes U+FFFD."""
        array = ids if isinstance(ids, np.ndarray) else np.array([*ids], dtype=np.int64)
        return self._codec.decode(array[array < self.vocab_size].tolist())


def tokenizer_files(path: Path) -> dict[str, Path]:
    """The files of the tokenizer at `path` (a file or a folder): standard name, under which they
    are copied → current path. Raises UserError if there is no tokenizer.

    A file's format is recognized by its content. Accompanying files in the same folder are included
    only if the file has its standard name.
    """
    if os.path.isdir(path):  # an OSError is no folder either
        found = [path / name for name in (MODEL, JSON) if is_file(path / name)]
        if not found:
            why, remedy = f"it contains neither {MODEL} nor {JSON}", f"{GIVE_JSON}, or train one: "
            raise UserError("tokenizer", str(path), why, f"{remedy}`python -m tools.tokenizer`")
        path = found[0]
    try:
        with open(path, "rb") as file:
            is_json = file.read(64).lstrip().startswith(b"{")
    except OSError as error:
        raise_passing(error)
        why = f"it cannot be read ({error.strerror})"
        remedy = "train one: `python -m tools.tokenizer`"
        raise UserError("tokenizer", str(path), why, remedy) from error
    name = JSON if is_json else MODEL
    beside = (*BESIDE, *([] if is_json else [JSON])) if path.name == name else ()
    return {name: path} | {
        other: path.with_name(other) for other in beside if is_file(path.with_name(other))
    }


def clean(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 cannot encode, replaced by U+FFFD.

    They can come from JSON escapes ("\\ud800"), and one would abort days of data preparation.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
