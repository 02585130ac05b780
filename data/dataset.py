"""A prepared folder as one long sequence of tokens per split, read on demand.

Opening reads index.json and checks the size of every shard, so that a missing or truncated file is
found before the first step and not in the middle of the run. A shard's header is checked when the
shard is first mapped; its content is not checked.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.config import DataConfig
from data.shards import DTYPES, FORMAT, REMEDY, VERSION, map_tokens
from data.tokenizer import JSON, MODEL, Tokenizer, tokenizer_files
from errors import UserError, is_file, raise_passing

MAPPED_SHARDS = 1 << 15  # at most, of all data; Linux allows a process 65,530 mappings


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
        keys = ("file", "tokens", "bytes", "sha256")
        self._shards = [tuple(shard[key] for key in keys) for shard in entry["shards"]]
        self._dtype = np.dtype(index["dtype"])
        # _starts[i]: tokens before shard i; one more entry than shards.
        self._starts = [0, *accumulate(tokens for _, tokens, *_ in self._shards)]
        self.num_tokens: int = self._starts[-1]
        self.vocab_size: int = index["vocab_size"]
        self.tokenizer_sha256: str = index["tokenizer_sha256"]
        self.bos_id: int | None = index.get("bos_id")
        self.unigram_nats_per_token: float | None = index["unigram_nats_per_token"]
        matters = [index["format"], index["version"], index["dtype"], self.tokenizer_sha256, split]
        matters += [[tokens, sha256] for _, tokens, _, sha256 in self._shards]
        self.checksum = hashlib.sha256(json.dumps(matters).encode()).hexdigest()

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
        sha256 = Tokenizer.load(tokenizer, "data.tokenizer").sha256 if tokenizer else None
        if sha256 not in (None, index["tokenizer_sha256"]):
            why = f"{folder} was prepared with another tokenizer (sha256 "
            why += f"{index['tokenizer_sha256'][:12]}…, this one has {sha256[:12]}…)"
            remedy = f"leave it empty, or give {folder}"
            raise UserError("data.tokenizer", str(tokenizer), why, remedy)
        try:
            dataset = cls(folder, index, split)
        except (KeyError, TypeError, AttributeError) as error:
            why = f"its index is damaged: {type(error).__name__} {error}"
            raise UserError("data.path", str(folder / "index.json"), why, REMEDY) from error
        for file, _, size, _ in dataset._shards:
            path = folder / file
            found = path.stat().st_size if is_file(path) else "no"
            if found != size or Path(file).name != file:
                why = f"the shard has {found} bytes, and index.json lists {size}"
                raise UserError("data.path", str(path), why, REMEDY)
        if dataset.num_tokens == 0:
            why = f"its split {split!r} is empty"
            remedy = "prepare it again, with more text or --heldout-fraction 0.05"
            if split == "heldout":
                remedy += ", or train without evaluation (train.eval_interval=0)"
            raise UserError("data.path", str(folder), why, remedy)
        return dataset

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer file in the folder, with which the data was prepared. It may be missing."""
        found = (self.folder / name for name in (MODEL, JSON) if is_file(self.folder / name))
        return next(found, self.folder / MODEL)

    def window(self, start: int, length: int) -> np.ndarray:
        """[length] tokens that begin at position `start` of the split, in the stored dtype."""
        if not 0 <= start <= start + length <= self.num_tokens:
            raise IndexError(f"tokens {start}..{start + length} of {self.num_tokens}")
        shard = bisect_right(self._starts, start) - 1
        pieces, end = [], start + length
        while start < end:
            first, until = self._starts[shard], min(end, self._starts[shard + 1])
            pieces.append(self._tokens_of(shard)[start - first : until - first])
            start = until
            shard += 1
        return np.concatenate(pieces)

    @lru_cache(maxsize=MAPPED_SHARDS)  # noqa: B019  (of all data together)
    def _tokens_of(self, shard: int) -> np.ndarray:
        file, tokens, *_ = self._shards[shard]
        return map_tokens(self.folder / file, self._dtype, tokens)


class Mixture:
    """Weighted data sets that share a tokenizer; a single one is a mixture of one.

    checksum: covers the sources' checksums, in order, and their weights; together with the seed and
        the sequence length they determine every sample.
    unigram_nats_per_token: the weighted mean of the sources' values.
    """

    def __init__(self, sources: Sequence[TokenDataset], weights: Sequence[float]) -> None:
        self.sources, self.weights = list(sources), [float(weight) for weight in weights]
        first = self.sources[0]
        check_same_tokenizer(self.sources, "prepare all sources with the same tokenizer")
        self.vocab_size, self.bos_id = first.vocab_size, first.bos_id
        self.tokenizer_path, self.tokenizer_sha256 = first.tokenizer_path, first.tokenizer_sha256
        self.tokenizer: dict[str, bytes] = {}  # its files, as `read_tokenizer` last read them
        checksums = [source.checksum for source in self.sources]
        self.checksum = first.checksum
        if len(checksums) > 1:
            matters = [list(pair) for pair in zip(checksums, self.weights, strict=True)]
            self.checksum = hashlib.sha256(json.dumps(matters).encode()).hexdigest()
        nats = [source.unigram_nats_per_token for source in self.sources]
        mean = None if None in nats else float(np.average(nats, weights=self.weights))
        self.unigram_nats_per_token: float | None = mean

    def read_tokenizer(self) -> dict[str, bytes]:
        """The files of its tokenizer, as they are in the folder now: name → content. Raises
        UserError unless they are those with which the data was prepared: the folder may have been
        prepared anew while the shards that a run has mapped stay. (Files for other tools may have
        been corrected.)"""
        path, wanted = self.tokenizer_path, self.tokenizer_sha256
        try:
            files = {name: file.read_bytes() for name, file in tokenizer_files(path).items()}
            if files == self.tokenizer:  # to parse a large one takes half a second
                return files
            found, why = Tokenizer(files, str(path)).sha256, ""
            if found != wanted:
                why = f"the data was prepared with another tokenizer (sha256 {wanted[:12]}…, this "
                why += f"one has {found[:12]}…)"
        except UserError as error:
            why = f"this should be the data's tokenizer, and {error.why}"
        except OSError as error:
            raise_passing(error)
            why = f"{error.filename} cannot be read ({error.strerror})"
        if why:
            remedy = "put the data's own back (each checkpoint trained on it has a copy), or "
            raise UserError("data.path", str(path), why, f"{remedy}prepare the data again")
        self.tokenizer = files
        return files


def check_same_tokenizer(sources: Sequence[TokenDataset], remedy: str) -> None:
    """Raises UserError if one of them was prepared with another tokenizer than the first."""
    for other in sources[1:]:
        if other.tokenizer_sha256 != sources[0].tokenizer_sha256:
            why = f"it and {sources[0].folder} were prepared with different tokenizers"
            raise UserError("data.path", str(other.folder), why, remedy)


def open_data(
    config: DataConfig, split: str, open_one: Callable[..., TokenDataset] = TokenDataset.open
) -> Mixture:
    """Opens split `train` or `heldout` of every folder in `config.path`. Raises UserError if any of
    them is not usable."""
    paths = config.weights()
    if not paths:
        why = "it names no data"
        raise UserError("data.path", paths, why, "give a prepared folder, or {folder: weight, …}")
    sources = [open_one(path, split, tokenizer=config.tokenizer) for path in paths]
    for source in sources:
        if config.document_mask and (source.bos_id is None or source.bos_id < 0):
            why = f"documents are found by the bos that begins each, and {source.folder} has none"
            remedy = "set data.document_mask=false, or prepare the data with a tokenizer with bos"
            raise UserError("data.document_mask", True, why, remedy)
    return Mixture(sources, list(paths.values()))


def _read_index(folder: Path) -> dict:
    path = folder / "index.json"
    try:
        index = json.loads(path.read_text())
    except OSError as error:
        raise_passing(error)
        why = f"it contains no prepared data (index.json: {error.strerror})"
        remedy = "prepare it with `python -m tools.prepare`; `make data` prepares prepared/laptop"
        raise UserError("data.path", str(folder), why, remedy) from error
    except ValueError as error:
        why = f"its index is damaged: {error}"
        raise UserError("data.path", str(path), why, REMEDY) from error
    about = [index.get(key) for key in ("format", "version")] if isinstance(index, dict) else []
    if about != [FORMAT, VERSION] or index.get("dtype") not in DTYPES:
        why = f"it is not a {FORMAT} index of version {VERSION}, of dtype uint16 or uint32"
        raise UserError("data.path", str(path), why, REMEDY)
    return index
