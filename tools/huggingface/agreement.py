"""What a folder in Hugging Face format states in more than one file. Statements that disagree are
refused: whichever were chosen, the model might be trained, stopped or exported by the wrong one.

    config.json             the model; bos and eos, if generation_config.json does not say them,
                            else its eos are among that file's, and its bos is the same. Within it,
                            rope_theta, rope_scaling and rope_parameters agree, model_type and
                            architectures, torch_dtype and dtype (config.py)
    generation_config.json  kept and exported, also after training. Each eos_token_id ends a text
                            that is generated; the tokenizer's eos, which closes documents, is one
                            of them. Sampling parameters and pad_token_id are not used here
    *.safetensors           the weights; their dtypes count, not config.json's
    tokenizer.model, or else tokenizer.json
                            text and ids
    tokenizer_config.json, special_tokens_map.json
                            bos and eos, those of tokenizer.model; add_bos_token. The rest is kept
    added_tokens.json, chat_template.jinja
                            kept. A token has the same id in all files, and an id the same token
    others                  left out

A checkpoint keeps generation_config.json with the tokenizer's files; it has no config.json.
"""

from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece

from data.token_roles import CONFIG as TOKENIZER_CONFIG
from data.token_roles import content_of
from data.tokenizer import GENERATION, JSON, MODEL, Tokenizer
from errors import UserError
from tools.huggingface.config import CONFIG, read_json

EDIT = "correct the file that is wrong"
COPY = "correct it, or copy the file again"
SAVE_AGAIN = (  # a checkpoint's own files have checksums
    "correct that file in the folder of the prepared data (data.path), and let the run save "
    "another checkpoint"
)
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def generation_config(folder: Path, tokenizer: Tokenizer, num_rows: int) -> dict[str, Any]:
    """What generation needs to know of the model in `folder`, a Hugging Face folder or a
    checkpoint: its generation_config.json, with the tokens that only config.json or the tokenizer
    states. num_rows: the model's vocabulary.

    Raises UserError if the files of a Hugging Face folder disagree.
    """
    files = [file for file in (GENERATION, CONFIG) if (folder / file).is_file()]
    remedy = COPY if CONFIG in files else SAVE_AGAIN
    contents = {file: read_json(folder / file, remedy) for file in files}
    own = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    found = {key: token for key, token in own.items() if token >= 0}
    for key in IDS:
        # (file, ids) of each that states them; the first one counts
        all_said = ((file, _ids(folder / file, contents[file], key, remedy)) for file in files)
        said = [(file, ids) for file, ids in all_said if ids]
        if not said:
            continue
        file, among = said[0]
        found[key] = contents[file][key]
        if key == "pad_token_id":  # used by nothing here
            continue
        token = own[key]
        if CONFIG not in files:  # a checkpoint, whose documents ended with its tokenizer's eos
            if key == "eos_token_id" and token not in among:
                found[key] = [*among, token]
            continue
        refuse = partial(UserError, f"{folder / said[-1][0]}: {key}", contents[said[-1][0]][key])
        for of_file, ids in said:
            if wrong := [each for each in ids if not 0 <= each < num_rows]:
                why = f"the model's vocabulary has {num_rows} tokens"
                raise UserError(f"{folder / of_file}: {key}", wrong[0], why, EDIT)
        if not {*said[-1][1]} <= {*among}:
            raise refuse(f"{file} in the same folder says {contents[file][key]}", EDIT)
        if 0 <= token not in among:
            other = f"{EDIT}, or give the tokenizer of this model: --tokenizer PATH"
            raise refuse(f"its tokenizer says {token}", other)
    return contents.get(GENERATION, {}) | found


def ends(generation: dict[str, Any]) -> list[int]:
    """The tokens at which generation stops."""
    stated = generation["eos_token_id"]
    return stated if isinstance(stated, list) else [stated]


def _ids(path: Path, content: dict[str, Any], key: str, remedy: str) -> list[int]:
    value = content.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in ids):
        why = "it must be the id of a token, or a list of ids"
        raise UserError(f"{path}: {key}", value, why, remedy)
    return ids


def check_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Raises UserError if two files of the tokenizer give a token different ids, or an id different
    tokens."""
    files = tokenizer.files
    vocabularies = {name: _vocabulary(name, files[name]) for name in (MODEL, JSON) if name in files}
    added = content_of(files, "added_tokens.json", str(folder))
    decoder = content_of(files, TOKENIZER_CONFIG, str(folder)).get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(
        i.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
        for i, token in decoder.items()
    ):
        why = 'it must be {"ID": {"content": "TOKEN", …}, …}'
        key = f"{folder / TOKENIZER_CONFIG}: added_tokens_decoder"
        raise UserError(key, decoder, why, COPY)
    vocabularies["added_tokens.json"] = {t: i for t, i in added.items() if type(i) is int}
    vocabularies[TOKENIZER_CONFIG] = {token["content"]: int(i) for i, token in decoder.items()}
    by_token: dict[str, tuple[int, str]] = {}
    by_id: dict[int, tuple[str, str]] = {}
    for file, vocabulary in vocabularies.items():
        for token, i in vocabulary.items():
            other, of_token = by_token.setdefault(token, (i, file))
            same, of_id = by_id.setdefault(i, (token, file))
            if other != i or same != token:
                why = f"{of_token} says {other}" if other != i else f"{of_id} says {same!r}"
                remedy = "copy the folder again; or give the right file, under another name: "
                remedy += "--tokenizer PATH"
                raise UserError(f"{folder / file}: token {i}", token, why, remedy)


def _vocabulary(name: str, content: bytes) -> dict[str, int]:
    """Token → id, by a tokenizer's file."""
    if name == JSON:
        import tokenizers

        return tokenizers.Tokenizer.from_str(content.decode()).get_vocab(with_added_tokens=True)
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    return {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
