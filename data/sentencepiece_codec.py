"""SentencePiece BPE (Kudo & Richardson 2018). What is trained here has everything off that alters
text, and so is exact.

A tokenizer that normalises cannot be inverted, and a model of source code needs its tabs, blank
lines and indentation back. So: identity normalisation, no dummy prefix, no removal of whitespace,
and bytes (`<0x00>`..`<0xFF>`) for every character outside the vocabulary. What SentencePiece itself
still loses is U+2581: it uses that character for the space and decodes it to one.
`SentencePieceCodec` spells it in bytes. Then decode(encode(x)) == x for every x that UTF-8 can
carry, that is every str but those with lone surrogates, which become U+FFFD.

A foreign model with a dummy prefix (Llama 2's) loses only U+2581, and what its own normalisation
loses.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator

import numpy as np
import sentencepiece

from data.foreign_tokenizers import not_a_tokenizer
from errors import UserError

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character


class SentencePieceCodec:
    """One SentencePiece model. Ids are in range(vocab_size); bos opens a document, eos closes it.

    Args:
        model: the serialized model, the content of a `.model` file.
        name: how messages call it (its path).

    Raises UserError when this is no SentencePiece model, or one without bos and eos.
    """

    def __init__(self, model: bytes, name: str) -> None:
        remedy = (
            "give a SentencePiece model with bos and eos, such as `python -m tools.tokenizer` "
            "writes, or a tokenizer.json"
        )
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            raise not_a_tokenizer(name, model, "this is not a SentencePiece model") from error
        self.adds_bos = True  # as the documents it was trained for begin
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.get_piece_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            raise UserError("tokenizer", name, "the model has no bos or no eos token", remedy)
        # A foreign model with a dummy prefix would put a space before each part; one without bytes
        # has no spelling.
        pieces = [f"<0x{byte:02X}>" for byte in SPACE_MARK.encode()]
        spelling = [self._processor.piece_to_id(piece) for piece in pieces]
        has_bytes = all(self._processor.is_byte(token) for token in spelling)
        prefixed = self._processor.encode("a", out_type=str)[0].startswith(SPACE_MARK)
        self._space_mark_ids = (
            np.array(spelling, dtype=np.int32) if has_bytes and not prefixed else None
        )

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each, as int32 arrays, without bos and eos; on one thread."""
        marked = [
            i
            for i, text in enumerate(texts)
            if self._space_mark_ids is not None and SPACE_MARK in text
        ]
        arrays = self._processor.encode([*texts], return_type="numpy", num_threads=1)
        for i in marked:
            parts = self._processor.encode(
                texts[i].split(SPACE_MARK), return_type="numpy", num_threads=1
            )
            spelled = [array for part in parts for array in (self._space_mark_ids, part)]
            # a mark between the parts, none before the first
            arrays[i] = np.concatenate(spelled[1:])
        return arrays

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`: bos and eos are silent, and bytes that are no UTF-8 become U+FFFD."""
        return self._processor.decode(ids)


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """A model trained on the lines of `texts`, which SentencePiece keeps in memory; the content of
    a `.model` file.

    Newlines are a token of their own, so no piece crosses a line. Pieces may cross scripts
    (`self.x`, `(i)`) and may be nothing but spaces (indentation): together 7% fewer tokens on
    Python. Digits are always single. Raises UserError when the text is too little for `vocab_size`,
    or `vocab_size` for the alphabet.
    """
    out = io.BytesIO()
    # by the source; SentencePiece makes words of its own of what its iterator raises
    refused: list[UserError] = []

    def lines() -> Iterator[str]:
        try:
            for text in texts:
                yield from filter(None, text.split("\n"))
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
            character_coverage=0.9995,  # rarer characters are spelled in bytes
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
            # bytes; longer lines are left out of training, not of encoding
            max_sentence_length=1 << 20,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        if refused:
            raise refused[0] from None
        if "sentences_.empty" in str(error):
            why = "there is no text to train on"
            raise UserError("--source", "(read)", why, "give another source") from error
        raise _refused_size(vocab_size, str(error)) from error
    return out.getvalue()


def _refused_size(vocab_size: int, said: str) -> UserError:
    """`said`: by SentencePiece, which advises options that it has and we have not."""
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", said):
        why = f"256 bytes, 4 special tokens and the characters of this text alone are {found[1]}"
        remedy = f"give at least {found[1]}; thousands are usual"
        return UserError("--vocab-size", vocab_size, why, remedy)
    if found := re.search(r"set it to a value <= (\d+)", said):
        why = f"this text has no more than {found[1]} different pieces"
        return UserError("--vocab-size", vocab_size, why, f"give at most {found[1]}, or more text")
    why = " ".join(said.split("] ")[-1].split())
    return UserError("--vocab-size", vocab_size, why, "choose another size, or give more text")
