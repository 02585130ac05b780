"""A prepared folder as one long sequence of tokens per split, read on demand.

Opening reads index.json and checks the size of every shard, so that a missing or truncated file is
found before the first step and not in the middle of the run. A shard's header is checked when the
shard is first mapped; its content is not checked. At most OPEN_SHARDS shards are mapped at a time:
a mapping holds a file descriptor, of which a process often may have only a thousand, and a data set
may have tens of thousands of shards.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.config import DataConfig
from data.shards import FORMAT, REMEDY, VERSION, map_tensor
from data.tokenizer import JSON, MODEL, Tokenizer
from errors import UserError

OPEN_SHARDS = 128
PREPARE = "prepare the data again: `python -m tools.prepare`"


class TokenDataset:
    """One split of one prepared folder, opened by `TokenDataset.open`.

    num_tokens: tokens in the split, over all shards. vocab_size: every token is below it.
    bos_id: the token that begins every document; None or negative if there is none.
    checksum: sha256 of everything that determines the tokens: format, dtype, tokenizer, split, and
        every shard's length and sha256.
    unigram_nats_per_token: see prepare.unigram_nats_per_token; None if nothing was held out.
    """

    def __init__(self, folder: Path, index: dict, split: str) -> None:
        self.folder, self.split = folder, split
        entry = index["splits"][split]
        keys = ("file", "tokens", "documents", "bytes", "sha256")
        self._shards = [tuple(shard[key] for key in keys) for shard in entry["shards"]]
        self._dtype = np.dtype(index["dtype"])
        # _starts[i]: tokens before shard i; one more entry than shards.
        self._starts = [0, *accumulate(tokens for _, tokens, *_ in self._shards)]
        self._starts_array = np.array(self._starts, dtype=np.int64)
        self.num_tokens: int = self._starts[-1]
        self.vocab_size: int = index["vocab_size"]
        self.tokenizer_sha256: str = index["tokenizer_sha256"]
        self.bos_id: int | None = index.get("bos_id")
        self.unigram_nats_per_token: float | None = index["unigram_nats_per_token"]
        matters = [index["format"], index["version"], index["dtype"], self.tokenizer_sha256, split]
        matters += [[tokens, sha256] for _, tokens, _, _, sha256 in self._shards]
        self.checksum = hashlib.sha256(json.dumps(matters).encode()).hexdigest()
        self.map_at_most(OPEN_SHARDS)

    @classmethod
    def open(cls, folder: str | Path, split: str, *, tokenizer: str | Path = "") -> "TokenDataset":
        """Opens split `train` or `heldout` of a prepared folder.

        tokenizer: the tokenizer (file or folder) with which the data must have been prepared;
            empty: any.
        Raises UserError if anything is missing, truncated, in another format or prepared with
        another tokenizer.
        """
        folder = Path(folder)
        index = _read_index(folder)
        if (
            tokenizer
            and (sha256 := Tokenizer.load(tokenizer, "data.tokenizer").sha256)
            != index["tokenizer_sha256"]
        ):
            why = (
                f"{folder} was prepared with another tokenizer (sha256 "
                f"{index['tokenizer_sha256'][:12]}…, this one has {sha256[:12]}…)"
            )
            remedy = f"leave it empty, or give {folder}"
            raise UserError("data.tokenizer", str(tokenizer), why, remedy)
        try:
            dataset = cls(folder, index, split)
        except (KeyError, TypeError, AttributeError) as error:
            why = f"its index is damaged: {type(error).__name__} {error}"
            raise UserError("data.path", str(folder / "index.json"), why, PREPARE) from error
        for file, _, _, size, _ in dataset._shards:
            path = folder / file
            if Path(file).name != file or not path.is_file():
                why = "the shard is missing, although index.json lists it"
                raise UserError("data.path", str(path), why, REMEDY)
            if (found := path.stat().st_size) != size:
                why = (
                    f"the shard has {found} bytes, but index.json lists {size}: "
                    "it is truncated or was replaced"
                )
                raise UserError("data.path", str(path), why, REMEDY)
        if dataset.num_tokens == 0:
            why = f"its split {split!r} is empty"
            remedy = "prepare it again, with more text"
            if split == "heldout":
                remedy = (
                    "train without evaluation (train.eval_interval=0), "
                    "or prepare it again with --heldout-fraction 0.05"
                )
            raise UserError("data.path", str(folder), why, remedy)
        return dataset

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer file in the folder, with which the data was prepared. It may be missing."""
        found = (self.folder / name for name in (MODEL, JSON) if (self.folder / name).is_file())
        return next(found, self.folder / MODEL)

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def document_starts(self, shard: int) -> np.ndarray:
        """[documents of that shard] int64: where each begins, counted from the shard's start."""
        file, _, documents, _, _ = self._shards[shard]
        return map_tensor(self.folder / file, "document_starts", np.dtype("int64"), documents)

    def window(self, start: int, length: int) -> np.ndarray:
        """[length] tokens that begin at position `start` of the split, in the stored dtype; a copy
        if the window spans shards, else a view."""
        if not 0 <= start <= start + length <= self.num_tokens:
            raise IndexError(f"tokens {start}..{start + length} of {self.num_tokens}")
        shard = bisect_right(self._starts, start) - 1
        pieces, end = [], start + length
        while start < end:
            first = self._starts[shard]
            piece = self._tokens_of(shard)[start - first : end - first]
            pieces.append(piece)
            start += len(piece)
            shard += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns copies of the windows that begin at `starts` [N]: [N, length], stored dtype.

        All windows of one shard are read at once: in a strided view of the mapping row i begins at
        token i, and a single indexing operation selects the rows.
        """
        windows = np.empty((len(starts), length), self._dtype)
        shard_of = np.searchsorted(self._starts_array, starts, side="right") - 1
        spanning = starts + length > self._starts_array[shard_of + 1]
        for shard in np.unique(shard_of[~spanning]).tolist():
            rows = np.flatnonzero((shard_of == shard) & ~spanning)
            tokens = self._tokens_of(shard)
            shape, strides = (len(tokens) - length + 1, length), tokens.strides * 2
            every_window = np.ndarray(shape, tokens.dtype, buffer=tokens, strides=strides)
            windows[rows] = every_window[starts[rows] - self._starts[shard]]
        for row in np.flatnonzero(spanning).tolist():
            windows[row] = self.window(int(starts[row]), length)
        return windows

    def map_at_most(self, shards: int) -> None:
        """Map at most so many shards at a time."""
        self._tokens_of = lru_cache(maxsize=shards)(self._map_tokens)

    def _map_tokens(self, shard: int) -> np.ndarray:
        file, tokens, *_ = self._shards[shard]
        return map_tensor(self.folder / file, "tokens", self._dtype, tokens)


class Mixture:
    """Weighted data sets that share a tokenizer; a single one is a mixture of one.

    checksum: covers the sources' checksums, in order, and their weights; together with the seed and
        the sequence length they determine every sample.
    unigram_nats_per_token: the weighted mean of the sources' values.
    """

    def __init__(self, sources: Sequence[TokenDataset], weights: Sequence[float]) -> None:
        self.sources, self.weights = list(sources), [float(weight) for weight in weights]
        for source in self.sources:  # whose shards are mapped at the same time
            source.map_at_most(max(1, OPEN_SHARDS // len(self.sources)))
        first = self.sources[0]
        for other in self.sources[1:]:
            if other.tokenizer_sha256 != first.tokenizer_sha256:
                why = f"it and {first.folder} were prepared with different tokenizers"
                remedy = "prepare all sources with the same tokenizer"
                raise UserError("data.path", str(other.folder), why, remedy)
        self.vocab_size, self.bos_id = first.vocab_size, first.bos_id
        self.tokenizer_path = first.tokenizer_path
        self.num_tokens = sum(source.num_tokens for source in self.sources)
        checksums = [source.checksum for source in self.sources]
        self.checksum = first.checksum
        if len(checksums) > 1:
            matters = [list(pair) for pair in zip(checksums, self.weights, strict=True)]
            self.checksum = hashlib.sha256(json.dumps(matters).encode()).hexdigest()
        nats = [source.unigram_nats_per_token for source in self.sources]
        self.unigram_nats_per_token: float | None = (
            None
            if None in nats
            else sum(n * w for n, w in zip(nats, self.weights, strict=True)) / sum(self.weights)
        )


Opened = dict[tuple[str, str], TokenDataset]  # by folder and split


def open_data(config: DataConfig, split: str, opened: Opened | None = None) -> Mixture:
    """Opens split `train` or `heldout` of every folder in `config.path`, or takes it from `opened`,
    where new ones are added. Raises UserError if any of them is not usable."""
    paths = config.path if isinstance(config.path, dict) else {config.path: 1.0}
    if not paths:
        why = "it names no data"
        raise UserError("data.path", paths, why, "give a prepared folder, or {folder: weight, …}")
    opened = {} if opened is None else opened
    for path in paths:
        if (path, split) not in opened:
            opened[path, split] = TokenDataset.open(path, split, tokenizer=config.tokenizer)
    sources = [opened[path, split] for path in paths]
    for source in sources:
        if config.document_mask and (source.bos_id is None or source.bos_id < 0):
            why = (
                "documents are found by the bos token that begins each, "
                f"and {source.folder} has none (bos_id {source.bos_id})"
            )
            remedy = (
                "set data.document_mask=false, or prepare the data again with a tokenizer that has "
                "bos"
            )
            raise UserError("data.document_mask", True, why, remedy)
    return Mixture(sources, list(paths.values()))


def _read_index(folder: Path) -> dict:
    path = folder / "index.json"
    try:
        index = json.loads(path.read_text())
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = f"its index cannot be read ({error.strerror})"
        if missing:
            why = "the folder contains no prepared data"
        remedy = "prepare it: `make data`, or `python -m tools.prepare`"
        raise UserError("data.path", str(folder), why, remedy) from error
    except ValueError as error:
        why = f"its index is damaged: {error}"
        raise UserError("data.path", str(path), why, PREPARE) from error
    ours = {"format": FORMAT, "version": VERSION}
    if not isinstance(index, dict) or {key: index.get(key) for key in ours} != ours:
        why = f"it is not a {FORMAT} index of version {VERSION}"
        raise UserError("data.path", str(path), why, PREPARE)
    if index.get("dtype") not in ("uint16", "uint32"):
        why = f"its token dtype {index.get('dtype')!r} is neither 'uint16' nor 'uint32'"
        raise UserError("data.path", str(path), why, PREPARE)
    return index
