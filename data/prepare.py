"""Tokenizes documents into shards, once, before training.

    documents --(this process, in order)--> chunks --(worker processes)--> token arrays
              --(this process, in order)--> shards

Each document becomes `[bos] its tokens [eos]`, as in Llama: generation starts from bos and stops at
eos. (There is no bos if the tokenizer has none, like Qwen's, or if it is the eos, like GPT-2's: the
eos before opens the document.) Chunk boundaries depend only on the source, and chunks are written
in its order, so the bytes on disk do not depend on the number of workers. At most
`2 * workers + 2` chunks are in flight, so memory does not depend on the size of the source. The
folder is written under a temporary name and renamed when it is complete, so that OUT is never
incomplete.

    OUT/index.json                   format, tokenizer's sha256, dtype; counts of what was left out;
                                     per split: shards, counts, checksums
    OUT/train-00000.safetensors …    see shards.py
    OUT/heldout-00000.safetensors …
    OUT/tokenizer.model              or tokenizer.json, and the files that belong to it
"""

import json
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from tqdm import tqdm

from data.files import Report
from data.heldout import Part, Splitter
from data.shards import FORMAT, VERSION, write_shard
from data.sources import documents, shown
from data.tokenizer import BESIDE, JSON, MODEL, Tokenizer
from errors import UserError, exists, is_file

SPLITS = ("train", "heldout")
# characters that a worker gets at a time: dozens of documents of typical length
CHUNK_CHARS = 1 << 18
# All documents of the first CHECK_ALL chunks are decoded, and then those of every CHECK_EVERY-th: a
# tokenizer may normalise text, or have no token for a character, and write its unknown token, or
# nothing. (Unknown tokens are counted exactly.) Decoding takes a sixth of the time of encoding.
CHECK_ALL, CHECK_EVERY = 16, 8
EXAMPLE_CHARS = 20
COUNTED = ("tokens", "documents", "characters", "utf8_bytes")  # of each split, in the index


class Encoded(NamedTuple):
    """The documents of one chunk that belong to one split."""

    documents: list[np.ndarray]  # the tokens of each, bos (if there is one) and eos included
    counts: dict[str, int]  # COUNTED; checked: documents that were decoded; changed: to other text
    example: tuple[str, str] | None  # a piece of the first of those, and what it became


def prepare(
    source: str | Sequence[str],
    tokenizer: Tokenizer,
    out: Path,
    *,
    text_field: str = "text",
    split: str = "train",
    heldout_fraction: float = 0.05,
    shard_tokens: int = 1 << 27,
    workers: int = 1,
    overwrite: bool = False,
    report: Report | None = None,
) -> dict:
    """Tokenizes `source`, or several, into the folder `out` and returns its index.

    heldout_fraction: the fraction of documents held out, chosen by the hash of their ids; if there
        are only a few documents, the fraction of each one (heldout.py).
    shard_tokens: a shard ends with the document that brings it to this many tokens. Of each split,
        one is in memory.
    workers: processes that tokenize; this process does the reading and writing.
    report: records what was read and left out, and says what may be left out.

    Raises UserError for what the user can fix, and then leaves nothing new at `out`.
    """
    sources = [source] if isinstance(source, str) else source
    _check_replaceable(out, overwrite)
    report = report or Report()
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")
    out = out.resolve()  # a symbolic link stays: its target is replaced
    partial = out.parent / f".{out.name}.partial-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
        writers = {
            name: _SplitWriter(partial, name, dtype, tokenizer, shard_tokens) for name in SPLITS
        }
        splitter = Splitter(documents(sources, text_field, split, report), heldout_fraction)
        # disable=None: shown only on a terminal
        with tqdm(
            desc=f"preparing {out.name}", unit=" tokens", unit_scale=True, disable=None
        ) as bar:
            for encoded in _encode(_chunks(splitter), tokenizer, dtype, workers):
                for writer, part in zip(writers.values(), encoded, strict=True):
                    writer.append(part)
                    bar.update(part.counts["tokens"])
        if not writers["train"].counts["tokens"]:
            why = "there are no training tokens: each of its documents is held out"
            remedy = "give more text, or a smaller --heldout-fraction"
            raise UserError("--source", shown(sources), why, remedy)
        index = {
            "format": FORMAT,
            "version": VERSION,
            "source": shown(sources),
            "dtype": dtype.name,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_sha256": tokenizer.sha256,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "heldout_fraction": heldout_fraction,
            # without this key, whole documents are held out (heldout.py)
            **({"heldout": "the end of each document"} if splitter.cuts else {}),
            # of what was left out (files.py); only the first is always there
            **{name: n for name, n in report.counts.items() if n or name == "empty_documents"},
            "unigram_nats_per_token": unigram_nats_per_token(
                writers["train"].histogram, writers["heldout"].histogram
            ),
            "splits": {name: writer.close() for name, writer in writers.items()},
        }
        counts = writers["train"].counts + writers["heldout"].counts
        if counts["unknown_tokens"] or counts["changed"]:
            lost = {name: counts[name] for name in ("unknown_tokens", "checked", "changed")}
            examples = (writer.example for writer in writers.values() if writer.example)
            index["text_not_kept"] = lost | {"example": next(examples, None)}
        for name, content in tokenizer.files.items():
            (partial / name).write_bytes(content)
        (partial / "index.json").write_text(json.dumps(index, indent=1) + "\n")
        _check_replaceable(out, overwrite)  # others may have written there in the meantime
        _put_in_place(partial, out)
    except BrokenExecutor as error:
        why = "one of these processes was killed, as the kernel does when memory runs out"
        raise UserError("--workers", workers, why, "give fewer workers, or more memory") from error
    # an error of writing: errors of reading the source are UserErrors
    except (OSError, SafetensorError) as error:  # a full disk can raise either
        remedy = "free some space, or give a folder where you have permission to write"
        why = f"it cannot be written ({getattr(error, 'strerror', None) or error})"
        raise UserError("--out", str(out), why, remedy) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return index


def unigram_nats_per_token(train: np.ndarray, heldout: np.ndarray) -> float | None:
    """Cross-entropy, in nats per token, of the held-out tokens under the training tokens'
    frequencies (add-one smoothed).

    A model that ignores its context reaches this loss; a trained model with a higher one is broken.
    train, heldout: [V], the number of occurrences of each token. None if nothing is held out.
    """
    if heldout.sum() == 0:
        return None
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(heldout * log_probability).sum() / heldout.sum())


def _check_replaceable(out: Path, overwrite: bool) -> None:
    """Raises UserError unless `out` may be replaced: only the output of an earlier `prepare` is
    ever deleted, and never the source."""
    if exists(out) and not out.is_dir():
        raise UserError("--out", str(out), "a file of that name exists", "give a folder")
    if os.path.ismount(out.resolve()):  # renaming would fail, after hours
        why = "it is a mount point, and only a folder inside one can be replaced"
        raise UserError("--out", str(out), why, f"give such a folder: {out / 'data'}")
    if not exists(out) or not any(out.iterdir()):
        return
    if not is_file(out / "index.json"):
        why = "the folder is neither empty nor a prepared one: it has no index.json"
        raise UserError("--out", str(out), why, "give another folder")
    if not overwrite:
        why = "the folder is not empty"
        raise UserError("--out", str(out), why, "give another folder, or add --overwrite")
    shard = rf"(?:{'|'.join(SPLITS)})-\d{{5,}}\.safetensors"
    names = {path.name for path in out.iterdir()} - {"index.json", MODEL, JSON, *BESIDE}
    for name in sorted(names):
        if not re.fullmatch(shard, name):
            why = f"it would be deleted, and it contains {name}, which `prepare` did not write"
            raise UserError("--out", str(out), why, "give another folder, or move that file away")


def _chunks(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Groups parts into chunks of at least CHUNK_CHARS characters, except the last."""
    chunk, characters = [], 0
    for part in parts:
        chunk.append(part)
        characters += len(part.text)
        if characters >= CHUNK_CHARS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _encode(
    chunks: Iterator[list[Part]], tokenizer: Tokenizer, dtype: np.dtype, workers: int
) -> Iterator[list[Encoded]]:
    """Tokenizes every chunk, in order, into one Encoded for each of SPLITS."""
    # spawn: works the same on Linux and macOS, and is safe even if this process has threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, context, _start_worker, (tokenizer.files, dtype.name)
    ) as pool:
        in_flight = deque()
        for number, chunk in enumerate(chunks):
            check = number < CHECK_ALL or number % CHECK_EVERY == 0
            in_flight.append(pool.submit(_encode_chunk, chunk, check))
            if len(in_flight) > 2 * workers + 1:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()


def _start_worker(files: dict[str, bytes], dtype: str) -> None:
    """Runs once in each worker process, and sets that process's globals."""
    # Ctrl-C reaches the whole process group; only the parent reacts to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that is killed cannot stop its workers, so each worker exits when its parent ends.
    threading.Thread(
        target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True
    ).start()
    global _worker_tokenizer, _worker_dtype
    _worker_tokenizer, _worker_dtype = Tokenizer(files), np.dtype(dtype)


def _encode_chunk(chunk: list[Part], check: bool) -> list[Encoded]:
    tokenizer, dtype = _worker_tokenizer, _worker_dtype
    result = []
    for side in (False, True):  # SPLITS
        texts = [part.text for part in chunk if part.held_out == side]
        arrays = tokenizer.encode_arrays(texts) if texts else []
        has_bos = 0 <= tokenizer.bos_id != tokenizer.eos_id
        bos = np.array([tokenizer.bos_id] if has_bos else [], dtype)
        eos = np.array([tokenizer.eos_id], dtype)
        documents = [np.concatenate([bos, array.astype(dtype), eos]) for array in arrays]
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        decoded = [tokenizer.decode(ids) for ids in arrays] if check else []
        pairs = zip(texts, decoded, strict=False)
        changed = [_difference(text, became) for text, became in pairs if text != became]
        totals = sum(map(len, documents)), len(documents), sum(map(len, texts)), num_bytes
        counts = dict(zip(COUNTED, totals, strict=True))
        counts |= {"checked": len(decoded), "changed": len(changed)}
        result.append(Encoded(documents, counts, next(iter(changed), None)))
    return result


def _difference(text: str, decoded: str) -> tuple[str, str]:
    pairs = enumerate(zip(text, decoded, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(text), len(decoded)))
    begin = max(0, at - EXAMPLE_CHARS // 2)
    return text[begin : begin + EXAMPLE_CHARS], decoded[begin : begin + EXAMPLE_CHARS]


class _SplitWriter:
    """Writes one split, shard after shard, and adds up what Encoded counts."""

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, tokenizer: Tokenizer, shard_tokens: int
    ) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._tokenizer, self._shard_tokens = tokenizer, shard_tokens
        self._shards: list[dict[str, Any]] = []  # those that are written
        self._shard, self._starts = bytearray(), list[int]()  # the one that is being filled
        self.histogram = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        self.counts: Counter[str] = Counter()
        self.example: tuple[str, str] | None = None  # of a text that is not kept

    def append(self, part: Encoded) -> None:
        self.counts.update(part.counts)
        self.example = self.example or part.example
        if part.documents:
            tokens = np.concatenate(part.documents)
            self.histogram += np.bincount(tokens, minlength=len(self.histogram))
        for document in part.documents:
            self._starts.append(len(self._shard) // self._dtype.itemsize)
            self._shard += document.data
            if len(self._shard) >= self._shard_tokens * self._dtype.itemsize:
                self._end_shard()
        self._check_control_tokens()

    def _check_control_tokens(self) -> None:
        """Raises UserError unless each document has one bos and one eos and no other control token:
        whatever the tokenizer does, a text cannot end its document."""
        of_document = {self._tokenizer.bos_id, self._tokenizer.eos_id}
        for token in self._tokenizer.control_ids:
            if self.histogram[token] != (token in of_document) * self.counts["documents"]:
                why = f"it read its control token {token} in a document's text"
                remedy = "give another file of this tokenizer: tokenizer.model or tokenizer.json"
                raise UserError("--tokenizer", self._tokenizer.sha256[:12], why, remedy)

    def close(self) -> dict[str, Any]:
        """The split's entry of the index."""
        if self._starts:
            self._end_shard()
        unk, control = self._tokenizer.unk_id, self._tokenizer.control_ids
        if unk >= 0 and unk not in control:
            self.counts["unknown_tokens"] = int(self.histogram[unk])
        return {name: self.counts[name] for name in COUNTED} | {"shards": self._shards}

    def _end_shard(self) -> None:
        path = self._folder / f"{self._split}-{len(self._shards):05d}.safetensors"
        tokens = np.frombuffer(self._shard, self._dtype)
        self._shards.append(write_shard(path, tokens, self._starts))
        self._shard, self._starts = bytearray(), []


def _put_in_place(partial: Path, out: Path) -> None:
    """Renames `partial` to `out`. An existing `out` (with --overwrite, or an empty folder) is first
    renamed, and removed afterwards."""
    old = partial.with_name(partial.name + "-old")
    try:
        if exists(out):
            out.rename(old)
        partial.rename(out)
    finally:  # also after SIGTERM, which may come when a rename is done
        if exists(old) and not exists(out):
            old.rename(out)
        shutil.rmtree(old, ignore_errors=True)
