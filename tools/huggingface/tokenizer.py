"""Creates a tokenizer's files for Hugging Face's tools: tokenizer.json from a SentencePiece model.

transformers 5 would convert the model itself, with merges in the order of ids and a space before
every text; the file made here gives the ids with which the model was trained. There are two
exceptions, the same in all of Hugging Face's tools: U+2581 in a text is treated as a space, and the
name of a control token (`</s>`) as that token.
"""

import json

import sentencepiece

from data.sentencepiece_codec import SPACE_MARK, starts_with_space
from data.token_roles import CONFIG, content_of
from data.tokenizer import JSON, MODEL, Tokenizer

# Texts that reveal a different normalisation; the pieces themselves are tested too.
PROBES = [
    "  two  spaces ",
    "\tx\r\n\n",
    "ﬁ ① Ａ é e\u0301 \u00a0",
    "漢字 🐍 \x00\x7f",
    "a" * 50,
    " " * 50,
    "1234567890",
    "<0x41>",
]


def huggingface_files(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """Name → content: the tokenizer's own files, plus tokenizer.json and tokenizer_config.json, or
    what they lack.

    There is no tokenizer.json if the one made here could not reproduce the SentencePiece model.
    """
    import tokenizers

    files, made = dict(tokenizer.files), None
    content = given = content_of(files, CONFIG, CONFIG)
    is_model = next(iter(files)) == MODEL
    if JSON not in files and (made := tokenizer_json(files[MODEL], tokenizer.adds_bos)) is not None:
        files[JSON] = made
    if made is not None or (JSON in files and not given):
        names = tokenizers.Tokenizer.from_str(files[JSON].decode())
        roles = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "unk": tokenizer.unk_id}
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # uses tokenizer.json unchanged
            **{f"{r}_token": names.id_to_token(i) if i >= 0 else None for r, i in roles.items()},
            "add_bos_token": tokenizer.adds_bos,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        } | given
    if is_model and not tokenizer.starts_with_space:
        # else llama.cpp puts a space before every text, whatever the model does
        content = {"add_prefix_space": False} | content
    if content != given:
        files[CONFIG] = (json.dumps(content, indent=2) + "\n").encode()
    return files


def tokenizer_json(model: bytes, adds_bos: bool = True) -> bytes | None:
    """Converts a SentencePiece BPE model to tokenizer.json; None if any piece or probe would get
    other ids. adds_bos: whether a prompt begins with bos."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.get_piece_size())
    pieces = [processor.id_to_piece(token) for token in ids]
    special = [token for token in ids if processor.is_control(token) or processor.is_unknown(token)]
    kept_out = {
        *special,
        *(token for token in ids if processor.is_byte(token) or processor.is_unused(token)),
    }
    normal = {pieces[token]: processor.get_score(token) for token in ids if token not in kept_out}
    splits = [(piece[:at], piece[at:]) for piece in normal for at in range(1, len(piece))]
    merges = [(left, right) for left, right in splits if left in normal and right in normal]
    # SentencePiece first merges the pair that gives the piece with the best score
    merges.sort(key=lambda pair: -normal[pair[0] + pair[1]])
    unknown = pieces[processor.unk_id()]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    made = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = starts_with_space(processor)
    prefix = [normalizers.Prepend(SPACE_MARK)] if prefixed else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    made.add_special_tokens(
        [AddedToken(pieces[token], normalized=False, special=True) for token in special]
    )
    if adds_bos and (bos := processor.bos_id()) >= 0:
        opens = pieces[bos]
        made.post_processor = processors.TemplateProcessing(
            f"{opens} $A", f"{opens} $A {opens} $B", [(opens, bos)]
        )

    texts = [*PROBES, *(piece.replace(SPACE_MARK, " ") for piece in normal)]
    expected = processor.encode(texts, num_threads=1)
    same = all(
        made.encode(text, add_special_tokens=False).ids == found
        for text, found in zip(texts, expected, strict=True)
    )
    return made.to_str().encode() if same else None
