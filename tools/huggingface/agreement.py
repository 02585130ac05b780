"""What a folder in Hugging Face format states in more than one file. Statements that disagree are
refused: whichever were chosen, the model might be trained, stopped or exported by the wrong one.

    config.json             the model; bos and eos, if generation_config.json does not say them,
                            else its eos are among that file's, and its bos is the same. Within it,
                            rope_theta, rope_scaling and rope_parameters agree, and model_type
                            and architectures (config.py)
    generation_config.json  kept and exported, also after training. Each eos_token_id ends a text
                            that is generated; the tokenizer's eos, which closes documents, is one
                            of them. Sampling parameters and pad_token_id are not used here
    *.safetensors           the weights; their dtypes count, not config.json's
    tokenizer.model, or else tokenizer.json
                            text and ids
    tokenizer_config.json, special_tokens_map.json
                            bos and eos, those of tokenizer.model; add_bos_token; no token of texts
                            that tokenizer.model would spell. The rest is kept
    added_tokens.json, chat_template.jinja
                            kept. A token has the same id in all files, and an id the same token
                            (data/token_ids.py)
    others                  left out

A checkpoint keeps generation_config.json with the tokenizer's files; it has no config.json.
"""

from pathlib import Path
from typing import Any

from data.tokenizer import GENERATION, Tokenizer
from errors import UserError, is_file
from tools.huggingface.config import CONFIG, read_json

EDIT = "correct the file that is wrong"
COPY = "correct it, or copy the file again"
SAVE_AGAIN = (  # a checkpoint's own files have checksums
    "correct that file in the folder of the prepared data (data.path), and let the run save "
    "another checkpoint"
)
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def generation_config(
    folder: Path, tokenizer: Tokenizer, num_rows: int, key: str = "--hf"
) -> dict[str, Any]:
    """What generation needs to know of the model in `folder`, a Hugging Face folder or a
    checkpoint: its generation_config.json, with the tokens that only config.json or the tokenizer
    states. num_rows: the model's vocabulary.

    Raises UserError if the files of a Hugging Face folder disagree; with this key if one cannot be
    read, or if the tokenizer has more tokens than the model.
    """
    if tokenizer.vocab_size > num_rows:
        why = f"the tokenizer has {tokenizer.vocab_size} tokens, and the model {num_rows}"
        raise UserError(key, str(folder), why, "give the tokenizer of the same model")
    is_checkpoint = not is_file(folder / CONFIG)
    remedy = SAVE_AGAIN if is_checkpoint else COPY
    files = [folder / file for file in (GENERATION, CONFIG) if is_file(folder / file)]
    contents = {file: read_json(file, key, remedy) for file in files}
    found = dict(contents.get(folder / GENERATION, {}))
    for field, own in zip(IDS, (tokenizer.bos_id, tokenizer.eos_id, -1), strict=True):
        said = {file: content.get(field) for file, content in contents.items()}
        stated = [(file, value) for file, value in said.items() if value not in (None, [])]
        anything = is_checkpoint or field == "pad_token_id"  # which is used by nothing here
        for file, token in ((file, token) for file, value in stated for token in tokens_of(value)):
            if type(token) is not int or not (anything or 0 <= token < num_rows):
                why = f"it must be the id of a token, and the model has {num_rows}"
                raise UserError(f"{file}: {field}", token, why, remedy)
        if not stated:
            found |= {field: own} if own >= 0 else {}
            continue
        (first, value), (last, again) = stated[0], stated[-1]
        found[field], tokens = value, tokens_of(value)
        if anything:
            if field == "eos_token_id" and own not in tokens:  # it ended the checkpoint's documents
                found[field] = [*tokens, own]
        elif not {*tokens_of(again)} <= {*tokens}:
            why = f"{first.name} in the same folder says {value}"
            raise UserError(f"{last}: {field}", again, why, EDIT)
        elif 0 <= own not in tokens:
            other = f"{EDIT}, or give this model's tokenizer: tools.import_hf --tokenizer PATH"
            raise UserError(f"{last}: {field}", again, f"its tokenizer says {own}", other)
    return found


def tokens_of(stated: Any) -> list[Any]:
    """The ids that a field states: one, or a list."""
    return stated if isinstance(stated, list) else [stated]
