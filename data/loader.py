"""Assembles samples into the batches of one data-parallel rank; a thread reads them ahead.

    sample index --sampler--> window --dataset--> row

    rank r of dp takes rows r * B/dp .. (r + 1) * B/dp of the batch

The global batch is the same for every dp size, and a run's position in the data is one number, the
index of the next sample. So a run resumed with another dp size reads the same batches, and one
resumed with another batch size continues at the same sample.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.dataset import Mixture
from data.sampler import SampleOrder, count_windows, counts, merge_ranges, next_samples
from errors import UserError
from tokens import IGNORE


@dataclass(frozen=True)
class Earlier:
    """An earlier data stage (settings/data_stages.py): it has passed the samples before `samples`
    of `data`, in windows of `seq_len` tokens.

        0   web 0.9, code 0.1   S = 8192     web 0 … 8999, code 0 … 999      of each source's
        1   web 0.5, long 0.5   S = 8192     web 9000 …,   long 0 …          own samples
        2   web 0.5, long 0.5   S = 131072   web 0 …,      long 0 …

    In each, samples are counted from 0, and so are the samples of a source that is new, or whose
    windows have another length than before. A source that was read in windows of the same length
    continues where it was left: the same epochs, in the same permutations, so that within an epoch
    no window is read twice. All of this follows from the mixtures and from where each data stage
    ended.
    """

    data: Mixture
    seq_len: int
    samples: int


class BatchLoader:
    """An endless iterator over (tokens, targets), each [B / dp_size, S] int64 and contiguous.

    Args:
        data: what to read; a single data set is a mixture of one.
        seq_len: S. global_batch_size: B, in sequences, a multiple of dp_size.
        seed: seed of the shuffle. dp_rank, dp_size: select this process's rows.
        next_sample: where to begin: `state()["next_sample"]` of the run to resume.
        skipped: half-open ranges [begin, end) of sample indices that are never returned; rollbacks
            add them.
        earlier: the data stages of the run before this one; samples are counted from its beginning.
        prefetch: number of batches read ahead.
        shuffle: False reads every source in order, as evaluation does.

    Raises UserError if a source is too short for one window.
    """

    def __init__(
        self,
        data: Mixture,
        *,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        dp_rank: int,
        dp_size: int,
        next_sample: int = 0,
        skipped: Sequence[Sequence[int]] = (),
        earlier: Sequence[Earlier] = (),
        prefetch: int = 2,
        shuffle: bool = True,
    ) -> None:
        self._data = data
        self._order = _sample_order(data, seq_len, seed=seed, shuffle=shuffle, earlier=earlier)
        self._seq_len, self._global_batch_size = seq_len, global_batch_size
        rows = global_batch_size // dp_size
        self._mine = slice(dp_rank * rows, (dp_rank + 1) * rows)
        self._prefetch = prefetch
        self._start(next_sample, skipped)

    def __iter__(self) -> "BatchLoader":
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """The next batch. Raises any error of reading it, again at every later call."""
        if not self._ahead:
            raise RuntimeError("the loader is closed")
        reading, after = self._ahead[0]
        batch = reading.result()
        self._ahead.popleft()
        self.next_sample = after
        self._read_ahead()
        return batch

    def state(self) -> dict:
        """The state from which to resume after the last batch returned; serializable as JSON, and
        the same on all ranks."""
        skipped, checksum = [list(pair) for pair in self.skipped], self._data.checksum
        return {"next_sample": self.next_sample, "skipped": skipped, "checksum": checksum}

    def go_to(self, next_sample: int, skipped: Sequence[Sequence[int]]) -> None:
        """Moves to another sample and other skipped ranges, as if constructed with them."""
        self.close()
        self._start(next_sample, skipped)

    def close(self) -> None:
        """Stops the reading thread. May be called twice."""
        self._ahead.clear()
        self._reader.shutdown(cancel_futures=True)

    def _start(self, next_sample: int, skipped: Sequence[Sequence[int]]) -> None:
        self.skipped = merge_ranges(skipped)
        self.next_sample = next_sample  # follows the batches returned
        self._reader = ThreadPoolExecutor(1, "batch loader")
        # batches that are read or being read, each with the sample after it
        self._ahead: deque[tuple[Future[tuple[Tensor, Tensor]], int]] = deque()
        self._read_ahead()

    def _read_ahead(self) -> None:
        while len(self._ahead) < self._prefetch:
            begin = self._ahead[-1][1] if self._ahead else self.next_sample
            samples, after = next_samples(begin, self._global_batch_size, self.skipped)
            self._ahead.append((self._reader.submit(self._read, samples[self._mine]), after))

    def _read(self, samples: np.ndarray) -> tuple[Tensor, Tensor]:
        source, _, window = self._order.locate(samples)
        return _assemble(self._data, source, window, self._seq_len)


def check_state(state: dict, data: Mixture) -> None:
    """Raises UserError if `state` is a position in another data set: resuming would repeat some
    samples and miss others."""
    if state["checksum"] != data.checksum:
        path = " + ".join(str(source.folder) for source in data.sources)
        why = f"the run to resume read other data (checksum {state['checksum'][:12]}…, "
        why += f"this data has {data.checksum[:12]}…)"
        remedy = "give the data the run began with, or declare the change in data_stages"
        raise UserError("data.path", path, why, remedy)


def heldout_batches(
    data: Mixture,
    *,
    seq_len: int,
    num_samples: int,
    dp_rank: int,
    dp_size: int,
    rows: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields windows 0 .. num_samples - 1 of `data` once, in order: (tokens, targets), each
    [rows, S] int64.

    num_samples: upper limit. A mixture ends before any source would repeat.
    rows: rows of this rank per batch. A batch has rows * dp_size windows, and every rank gets the
        same number of batches.

    Rows beyond the last window have IGNORE for every target, so that the sum of losses over the
    counted targets, divided by their number, is the same for every layout.
    """
    order = _sample_order(data, seq_len, seed=0, shuffle=False)
    limit = min(num_samples, sum(order.num_windows))
    repeated = np.flatnonzero(order.locate(np.arange(limit))[1])  # epoch 1 begins
    limit = int(repeated[0]) if repeated.size else limit
    for first in range(0, limit, rows * dp_size):
        mine = np.arange(first + dp_rank * rows, first + (dp_rank + 1) * rows)
        source, _, window = order.locate(np.minimum(mine, limit - 1))
        tokens, targets = _assemble(data, source, window, seq_len)
        targets[torch.from_numpy(mine >= limit)] = IGNORE
        yield tokens, targets


def _sample_order(
    data: Mixture, seq_len: int, *, seed: int, shuffle: bool, earlier: Sequence[Earlier] = ()
) -> SampleOrder:
    num_windows = [count_windows(source.num_tokens, seq_len) for source in data.sources]
    for source, count in zip(data.sources, num_windows, strict=True):
        if count == 0:
            why = f"split {source.split!r} of {source.folder} has {source.num_tokens} tokens, and "
            why += f"a sample needs {seq_len + 1}"
            remedy = f"set train.seq_len to at most {source.num_tokens - 1}, or prepare more text"
            if source.split == "heldout":
                remedy += " or a larger --heldout-fraction, or set train.eval_interval=0"
            raise UserError("train.seq_len", seq_len, why, remedy)
    numbers, passed = _continued(data, seq_len, earlier)
    return SampleOrder(
        num_windows, data.weights, seed=seed, shuffle=shuffle, numbers=numbers, passed=passed
    )


def _continued(
    data: Mixture, seq_len: int, earlier: Sequence[Earlier]
) -> tuple[list[int], list[int]]:
    """For each source of `data`: its number in the run, which decides its permutations, and how
    many of its samples the earlier stages have passed. Without earlier stages: (0, 1, …), zeros."""
    # A source is known by its content and the length of its windows (and one that a mixture names
    # twice, by which of them).
    numbers: dict[tuple[str, int, int], int] = {}
    passed: Counter[int] = Counter()
    for stage in [*earlier, Earlier(data, seq_len, samples=0)]:
        mine, seen = [], Counter[str]()
        for source in stage.data.sources:
            key = (source.checksum, stage.seq_len, seen[source.checksum])
            seen[source.checksum] += 1
            mine.append(numbers.setdefault(key, len(numbers)))
        for number, count in zip(mine, counts(stage.data.weights, stage.samples), strict=True):
            passed[number] += count
    return mine, [passed[number] for number in mine]


def _assemble(
    data: Mixture, source: np.ndarray, window: np.ndarray, seq_len: int
) -> tuple[Tensor, Tensor]:
    """Reads window[i] of source[i] for every i ([N] each): (tokens, targets), each [N, S] int64."""
    where = zip(source.tolist(), window.tolist(), strict=True)
    read = np.stack([data.sources[s].window(w * seq_len, seq_len + 1) for s, w in where])
    tokens, targets = read[:, :-1].astype(np.int64), read[:, 1:].astype(np.int64)
    return torch.from_numpy(tokens), torch.from_numpy(targets)
