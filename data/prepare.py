"""Documents to token shards, once, before training.

    documents --(this process, in order)--> chunks --(worker processes)--> token arrays
              --(this process, in order)--> shards

Each document becomes `[bos] its tokens [eos]` as in Llama: generation starts from bos and stops at
eos. (Without bos where the tokenizer has none, as Qwen's.) Only the source decides where chunks are
cut, and they are written in its order, so the bytes on disk do not depend on the number of workers.
At most `2 * workers + 2` chunks are in flight, so memory does not depend on the size of the source.
The folder is written beside its final place and renamed when complete: whole or not at all.

    OUT/index.json                   format, tokenizer's sha256, dtype; per split: shards, counts,
                                     checksums
    OUT/train-00000.safetensors …    see shards.py
    OUT/heldout-00000.safetensors …
    OUT/tokenizer.model              or tokenizer.json and what belongs to it
"""

import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.files import Report
from data.heldout import Part, Splitter
from data.shards import FORMAT, VERSION, ShardWriter
from data.sources import Document, documents
from data.tokenizer import Tokenizer
from errors import UserError

SPLITS = ("train", "heldout")
# characters a worker gets at a time; of documents of a typical length, dozens
CHUNK_CHARS = 1 << 18


class Encoded(NamedTuple):
    """What a worker makes of the documents of one chunk that fall in one split."""

    tokens: np.ndarray  # [sum of lengths], the shards' dtype
    # [documents], int64: tokens of each, bos (if there is one) and eos included
    lengths: np.ndarray
    characters: int
    utf8_bytes: int


def prepare(
    source: str,
    tokenizer: Tokenizer,
    out: Path,
    *,
    text_field: str | None = None,
    split: str = "train",
    heldout_fraction: float = 0.05,
    shard_tokens: int = 1 << 27,
    workers: int = 1,
    overwrite: bool = False,
    report: Report | None = None,
) -> dict:
    """Tokenizes `source` into the folder `out` and returns its index.

    heldout_fraction: of the documents, chosen by the hash of their ids, or of each of a few
        documents (heldout.py).
    shard_tokens: a shard is closed by the document with which it reaches this many tokens.
    workers: processes that tokenize; this process reads and writes beside them.
    report: is told which files were read, and which were left out.

    Raises UserError for what the user can fix; nothing is left at `out` then.
    """
    _check(tokenizer, out, heldout_fraction, shard_tokens, workers)
    _check_replaceable(source, out, overwrite)
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        writers = {
            name: _SplitWriter(partial, name, dtype, tokenizer.vocab_size, shard_tokens)
            for name in SPLITS
        }
        counts = {"documents": 0, "empty_documents": 0}
        splitter = Splitter(
            _not_empty(documents(source, text_field, split, report), counts), heldout_fraction
        )
        # None: a terminal only
        with tqdm(
            desc=f"preparing {out.name}", unit=" tokens", unit_scale=True, disable=None
        ) as bar:
            for encoded in _encode(_chunks(splitter), tokenizer, dtype, workers):
                for writer, part in zip(writers.values(), encoded, strict=True):
                    writer.append(part)
                    bar.update(len(part.tokens))
        if writers["train"].tokens == 0:
            why = (
                f"no training tokens: of its {counts['documents']} documents every one is empty or "
                "held out"
            )
            remedy = "give more text, or a smaller --heldout-fraction"
            raise UserError("--source", source, why, remedy)
        index = {
            "format": FORMAT,
            "version": VERSION,
            "source": source,
            "dtype": dtype.name,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_sha256": tokenizer.sha256,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "heldout_fraction": heldout_fraction,
            # else whole documents (heldout.py)
            **({"heldout": "the end of each document"} if splitter.cuts else {}),
            "empty_documents": counts["empty_documents"],  # left out: they hold nothing to learn
            "unigram_nats_per_token": unigram_nats_per_token(
                writers["train"].histogram, writers["heldout"].histogram
            ),
            "splits": {name: writer.close() for name, writer in writers.items()},
        }
        for name, content in tokenizer.files.items():
            (partial / name).write_bytes(content)
        (partial / "index.json").write_text(json.dumps(index, indent=1) + "\n")
        _put_in_place(partial, out)
    except OSError as error:  # what reading the source raises is a UserError
        remedy = "make room, or name a folder where you may write"
        why = f"cannot be written ({error.strerror or error})"
        raise UserError("--out", str(out), why, remedy) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return index


def unigram_nats_per_token(train: np.ndarray, heldout: np.ndarray) -> float | None:
    """Cross-entropy, in nats per token, of the held-out tokens under the training tokens'
    frequencies (add-one smoothed).

    What a model reaches that looks at nothing: a loss above it means that something is broken.
    train, heldout: [V], how often each token occurs. None when nothing is held out.
    """
    if heldout.sum() == 0:
        return None
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(heldout * log_probability).sum() / heldout.sum())


def _check(
    tokenizer: Tokenizer, out: Path, heldout_fraction: float, shard_tokens: int, workers: int
) -> None:
    if not 0 <= heldout_fraction < 1:
        why = "it is a fraction of the documents"
        raise UserError("--heldout-fraction", heldout_fraction, why, "0 <= fraction < 1")
    if shard_tokens < 1:
        why = "a shard holds at least one token"
        raise UserError("--shard-tokens", shard_tokens, why, "at least 1; 134217728 is usual")
    if workers < 1:
        why = "somebody must tokenize"
        raise UserError("--workers", workers, why, "at least 1; one per core is best")
    if tokenizer.vocab_size > 1 << 32:
        why = "ids are stored in 32 bits"
        raise UserError("--tokenizer", tokenizer.vocab_size, why, "a vocabulary of at most 2**32")


def _check_replaceable(source: str, out: Path, overwrite: bool) -> None:
    """Only what an earlier `prepare` wrote is ever deleted, and never the source."""
    if out.exists() and not out.is_dir():
        raise UserError("--out", str(out), "there is a file of that name", "name a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / "index.json").is_file():
        why = "the folder is not empty, and no prepared one: it has no index.json"
        raise UserError("--out", str(out), why, "name another one")
    if not overwrite:
        why = "the folder is not empty"
        raise UserError("--out", str(out), why, "name another one, or give --overwrite")
    if out.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        why = f"it holds the source {source}, and would be deleted"
        raise UserError("--out", str(out), why, "name another one")


def _not_empty(stream: Iterator[Document], counts: dict[str, int]) -> Iterator[Document]:
    """The documents that have text; `counts` is brought up to date on the way."""
    for document in stream:
        counts["documents"] += 1
        if document.text:
            yield document
        else:
            counts["empty_documents"] += 1


def _chunks(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """In groups of at least CHUNK_CHARS characters."""
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
    """Per chunk, in order, what its documents became: one Encoded for each of SPLITS."""
    # spawn: the same on Linux and macOS, and safe whatever threads this process has.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, context, _start_worker, (tokenizer.files, dtype.name)
    ) as pool:
        in_flight = deque()
        for chunk in chunks:
            in_flight.append(pool.submit(_encode_chunk, chunk))
            if len(in_flight) > 2 * workers + 1:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()


def _start_worker(files: dict[str, bytes], dtype: str) -> None:
    """Runs once in each worker process; what it sets is that process's own."""
    # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that was killed cannot stop its workers: they watch it.
    threading.Thread(
        target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True
    ).start()
    global _worker_tokenizer, _worker_dtype
    _worker_tokenizer, _worker_dtype = Tokenizer(files), np.dtype(dtype)


def _encode_chunk(chunk: list[Part]) -> list[Encoded]:
    tokenizer, dtype = _worker_tokenizer, _worker_dtype
    result = []
    for side in (False, True):  # SPLITS
        texts = [part.text for part in chunk if part.held_out == side]
        arrays = tokenizer.encode_arrays(texts) if texts else []
        bos = np.array([tokenizer.bos_id] if tokenizer.bos_id >= 0 else [], dtype)
        eos = np.array([tokenizer.eos_id], dtype)
        parts = [part for array in arrays for part in (bos, array.astype(dtype), eos)]
        tokens = np.concatenate([np.empty(0, dtype), *parts])
        lengths = np.array([len(bos) + len(array) + 1 for array in arrays], dtype=np.int64)
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        result.append(Encoded(tokens, lengths, sum(map(len, texts)), num_bytes))
    return result


class _SplitWriter:
    """Writes one split, shard after shard, and counts."""

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, vocab_size: int, shard_tokens: int
    ) -> None:
        self._folder, self._split = folder, split
        self._dtype, self._shard_tokens = dtype, shard_tokens
        self._shards: list[dict] = []
        self._open: ShardWriter | None = None
        self.histogram = np.zeros(vocab_size, dtype=np.int64)
        self.tokens = self.documents = self.characters = self.utf8_bytes = 0

    def append(self, part: Encoded) -> None:
        self.histogram += np.bincount(part.tokens, minlength=len(self.histogram))
        self.tokens += len(part.tokens)
        self.documents += len(part.lengths)
        self.characters += part.characters
        self.utf8_bytes += part.utf8_bytes
        ends = np.cumsum(part.lengths)
        document, token = 0, 0  # written so far
        while document < len(ends):
            if self._open is None:
                name = f"{self._split}-{len(self._shards):05d}.safetensors"
                self._open = ShardWriter(self._folder / name, self._dtype)
            # The document that makes the shard full is still written to it.
            room = self._shard_tokens - self._open.tokens
            last = min(int(np.searchsorted(ends, token + room)), len(ends) - 1)
            self._open.append(part.tokens[token : ends[last]], part.lengths[document : last + 1])
            document, token = last + 1, int(ends[last])
            if self._open.tokens >= self._shard_tokens:
                self._close_shard()

    def _close_shard(self) -> None:
        self._shards.append(self._open.close())
        self._open = None

    def close(self) -> dict:
        """The split's entry of the index."""
        if self._open is not None:
            self._close_shard()
        names = ("tokens", "documents", "characters", "utf8_bytes")
        counted = {name: getattr(self, name) for name in names}
        return counted | {"shards": self._shards}


def _put_in_place(partial: Path, out: Path) -> None:
    """Renames `partial` to `out`; what was there (--overwrite, or an empty folder) is removed after
    it has moved aside."""
    old = partial.with_name(partial.name + "-old")
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
