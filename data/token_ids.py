"""What the files of a tokenizer must agree on: a token has the same id in all of them, an id the
same token, and texts have the same tokens."""

import sentencepiece

from data.token_roles import CONFIG, content_of
from data.tokenizers_codec import parse
from errors import UserError

MODEL, JSON = "tokenizer.model", "tokenizer.json"
GIVE = "--tokenizer PATH of tools.prepare or tools.import_hf"


def check_tokens(files: dict[str, bytes], name: str) -> None:
    """Raises UserError if two files of the tokenizer `name` give a token different ids, or an id
    different tokens."""
    vocabularies = {
        file: _vocabulary(name, file, files[file]) for file in (MODEL, JSON) if file in files
    }
    added = content_of(files, "added_tokens.json", name)
    decoder = content_of(files, CONFIG, name).get("added_tokens_decoder") or {}
    try:
        vocabularies[CONFIG] = {token["content"]: int(i) for i, token in decoder.items()}
        texts_have = [t["content"] for t in decoder.values() if not t.get("special")]
    except (AttributeError, KeyError, TypeError, ValueError):
        why = f"{CONFIG} beside it must have added_tokens_decoder as "
        why += '{"ID": {"content": "TOKEN", …}, …}'
        raise UserError("tokenizer", name, why, "correct it, or copy the file again") from None
    if JSON in files:
        listed = parse(files[JSON], f"{name}: {JSON}").get_added_tokens_decoder().values()
        added_there = {token.content for token in listed if not token.special}
        texts_have += sorted(added_there - vocabularies[CONFIG].keys())  # which comes first
    for token in texts_have if MODEL in files else ():
        if token not in vocabularies[MODEL]:
            where = CONFIG if token in vocabularies[CONFIG] else JSON
            why = f"texts have {token!r} as one token by {where}, and {MODEL} would spell it"
            raise UserError("tokenizer", name, why, f"give the {JSON} of the same model: {GIVE}")
    vocabularies["added_tokens.json"] = {t: i for t, i in added.items() if type(i) is int}
    seen: dict[str | int, tuple[str | int, str]] = {}  # token → id and file; id → token and file
    for file, vocabulary in vocabularies.items():
        for token, i in vocabulary.items():
            for one, other in ((token, i), (i, token)):
                known, of_file = seen.setdefault(one, (other, file))
                if known != other:
                    why = f"{file} says that token {i} is {token!r}, and {of_file} says {known!r}"
                    remedy = "copy the folder again; or give the right file, under another name: "
                    raise UserError("tokenizer", name, why, remedy + GIVE)


def _vocabulary(name: str, file: str, content: bytes) -> dict[str, int]:
    """Token → id, by a file of the tokenizer `name`. Raises UserError if it cannot be read."""
    if file == JSON:
        return parse(content, f"{name}: {file}").get_vocab(with_added_tokens=True)
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    return {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
