"""SentencePiece BPE (Kudo & Richardson 2018). Models trained here are lossless: every option that
alters text is off.

A tokenizer that normalises cannot be inverted, and a model of source code must reproduce tabs,
blank lines and indentation. So: identity normalisation, no dummy prefix, no removal of whitespace,
and bytes (`<0x00>`..`<0xFF>`) for every character outside the vocabulary. SentencePiece itself
would still lose U+2581: it represents the space by that character, and decodes the character to a
space. `SentencePieceCodec` therefore encodes U+2581 as bytes. Then decode(encode(x)) == x for every
str x that UTF-8 can encode, that is, one without lone surrogates (which become U+FFFD).

A foreign model with a dummy prefix (Llama 2's) loses U+2581, whatever its own normalisation loses
and, without byte tokens, what it cannot spell: data preparation counts it (prepare.py).
"""

import hashlib
import io
from collections.abc import Iterable, Iterator

import numpy as np
import sentencepiece

from data.token_roles import not_a_tokenizer
from errors import UserError

SPACE_MARK = "\u2581"  # SentencePiece represents a space by this character
LONGEST = 1 << 18  # characters: training sees a longer line in parts


class SentencePieceCodec:
    """One SentencePiece model. Ids are in range(vocab_size); bos opens a document, eos closes it.

    Args:
        files: name → content, first the serialized model, then the files that accompany it.
        name: its name in error messages (its path).

    Raises UserError if this is not a SentencePiece model, or if it has no bos or eos.
    """

    def __init__(self, files: dict[str, bytes], name: str) -> None:
        model = next(iter(files.values()))
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            raise not_a_tokenizer(name, model, "this is not a SentencePiece model") from error
        self.adds_bos = True  # the training documents begin with bos too
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.get_piece_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            remedy = "give a SentencePiece model with both, or a tokenizer.json"
            raise UserError("tokenizer", name, "the model has no bos or no eos token", remedy)
        self.unk_id: int = self._processor.unk_id()
        self.control_ids = [*filter(self._processor.is_control, range(self.vocab_size))]
        ends = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        self.roles = {role: self._processor.id_to_piece(token) for role, token in ends.items()}
        # Impossible with two kinds of foreign models: one with a dummy prefix would put a space
        # before each part, and one without byte tokens cannot spell the mark.
        pieces = [f"<0x{byte:02X}>" for byte in SPACE_MARK.encode()]
        spelling = [self._processor.piece_to_id(piece) for piece in pieces]
        has_bytes = all(self._processor.is_byte(token) for token in spelling)
        self.starts_with_space = starts_with_space(self._processor)
        self._space_mark_ids: np.ndarray | None = None
        if has_bytes and not self.starts_with_space:
            self._space_mark_ids = np.array(spelling, dtype=np.int32)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, as int32 arrays, without bos and eos; runs on one thread."""
        arrays = self._processor.encode([*texts], return_type="numpy", num_threads=1)
        for i, text in enumerate(texts):
            if self._space_mark_ids is not None and SPACE_MARK in text:
                parts = self._processor.encode(
                    text.split(SPACE_MARK), return_type="numpy", num_threads=1
                )
                spelled = [array for part in parts for array in (self._space_mark_ids, part)]
                # a mark between two parts, but none before the first
                arrays[i] = np.concatenate(spelled[1:])
        return arrays

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; bos and eos give no text, and invalid UTF-8 becomes U+FFFD."""
        return self._processor.decode(ids)


def starts_with_space(processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether a model puts a space before every text (add_dummy_prefix)."""
    return processor.encode("a", out_type=str)[0].startswith(SPACE_MARK)


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a model on the lines of `texts`, which SentencePiece keeps in memory, and returns the
    content of its `.model` file.

    A newline is a separate token, so no piece crosses a line. Pieces may cross scripts (`self.x`,
    `(i)`) and may consist of spaces only (indentation); together this gives 7% fewer tokens on
    Python. Every digit is a separate token. Raises UserError if there is too little text for
    `vocab_size`, or if `vocab_size` is too small for the text's alphabet.
    """
    out = io.BytesIO()
    # Errors of the source: SentencePiece would replace an exception of its iterator by its own.
    refused: list[UserError] = []

    def lines() -> Iterator[str]:
        try:
            for text in texts:
                for line in text.split("\n"):
                    yield from (line[i : i + LONGEST] for i in range(0, len(line), LONGEST))
        except UserError as error:
            refused.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=out,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,  # rarer characters are encoded as bytes
            split_digits=True,
            split_by_unicode_script=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            max_sentence_length=4 * LONGEST,  # bytes; what is longer would be skipped
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        if refused:
            raise refused[0] from None
        if "sentences_.empty" in str(error):
            why = "there is no text to train on"
            raise UserError("--source", "(read)", why, "give another source") from error
        why = " ".join(str(error).split("] ")[-1].split())
        remedy = "choose another size (thousands are usual), or give more text"
        raise UserError("--vocab-size", vocab_size, why, remedy) from error
    return out.getvalue()
