"""The loader yields the same global batches in every layout and after every resume, loses no
sample, and reports errors of its reading thread."""

import json
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data.config import DataConfig
from data.dataset import Mixture, open_data
from data.loader import BatchLoader, heldout_batches
from errors import UserError
from tests.data_samples import STDLIB_FOLDER, prepared
from tokens import IGNORE

S = 64


def opened(path: str | dict[str, float], split: str = "train") -> Mixture:
    return open_data(DataConfig(path=path), split)


@pytest.fixture(scope="module")
def paths(data: Path, tmp_path_factory) -> tuple[str, str]:
    xml = prepared(tmp_path_factory.mktemp("xml") / "xml", str(STDLIB_FOLDER / "xml"))
    return str(data), str(xml)


def load(data, *, batch: int = 8, dp_rank: int = 0, dp_size: int = 1, **options) -> BatchLoader:
    options = {"seq_len": S, "global_batch_size": batch, "seed": 1} | options
    return BatchLoader(data, **options, dp_rank=dp_rank, dp_size=dp_size)


def take(data, count: int, *, dp_size: int = 1, **options) -> tuple[torch.Tensor, list[dict]]:
    """`count` global batches [count, B, 2, S], concatenated from the loaders of all ranks, and the
    loaders' states after them."""
    ranks, states = [], []
    for rank in range(dp_size):
        loader = load(data, dp_rank=rank, dp_size=dp_size, **options)
        batches = [next(loader) for _ in range(count)]
        assert all(t.is_contiguous() and t.dtype == torch.int64 for batch in batches for t in batch)
        ranks.append(torch.stack([torch.stack(batch, dim=1) for batch in batches]))
        states.append(loader.state())
        loader.close()
    return torch.cat(ranks, dim=1), states


def test_resume_with_another_dp_size_and_another_batch_size(paths) -> None:
    mixture = opened({paths[0]: 0.7, paths[1]: 0.3})
    rows = take(mixture, 40)[0].flatten(0, 1)  # samples 0 .. 319
    first, (state, *others) = take(mixture, 5, dp_size=4)
    assert others == [state] * 3
    stored = json.loads(json.dumps(state))
    del stored["checksum"]
    second, (state, *_) = take(mixture, 5, dp_size=2, batch=12, **stored)
    third, (state, *_) = take(mixture, 3, dp_size=3, batch=6, next_sample=state["next_sample"])
    together = torch.cat([part.flatten(0, 1) for part in (first, second, third)])
    assert torch.equal(together, rows[: len(together)])
    assert not torch.equal(first, take(mixture, 5, seed=2)[0])
    assert state["next_sample"] == len(together) == 40 + 60 + 18


def test_state_counts_what_was_handed_out_not_what_was_read_ahead(data: Path) -> None:
    single = opened(str(data))
    loader = load(single, prefetch=4)
    for n in range(5):
        assert len(loader._ahead) == 4
        assert loader.state() == {"next_sample": 8 * n, "skipped": [], "checksum": single.checksum}
        next(loader)
    loader.close()


def test_error_of_the_reading_thread_reaches_the_caller(data: Path, tmp_path) -> None:
    folder = Path(shutil.copytree(data, tmp_path / "breaks"))
    dataset = opened(str(folder))
    loader = load(dataset, prefetch=1, shuffle=False)
    next(loader)
    (folder / "train-00001.safetensors").unlink()  # not read yet: shards are opened when needed
    with pytest.raises(UserError, match=r"train-00001\.safetensors"):
        list(zip(loader, range(dataset.sources[0].num_tokens // S), strict=False))
    # Calling again neither hangs nor yields a later batch.
    with pytest.raises(UserError, match=r"train-00001\.safetensors"):
        next(loader)
    before = loader.state()["next_sample"]
    assert 0 < before <= dataset.sources[0]._starts[1] // S
    loader.close()


def test_close_ends_the_thread(data: Path) -> None:
    loader = load(opened(str(data)))
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)
    assert not [thread for thread in threading.enumerate() if "batch loader" in thread.name]


@pytest.mark.parametrize(
    ("dp_size", "rows", "samples"), [(1, 4, 50), (3, 5, 50), (2, 3, 10**9), (1, 7, 10**9)]
)
def test_heldout_mean_is_the_same_on_every_layout(paths, dp_size, rows, samples) -> None:
    data = opened(paths[0], "heldout")
    available = (data.sources[0].num_tokens - 1) // S
    count = min(samples, available)
    options = {"seq_len": S, "num_samples": samples, "dp_size": dp_size, "rows": rows}
    ranks = [list(heldout_batches(data, dp_rank=rank, **options)) for rank in range(dp_size)]
    assert {len(batches) for batches in ranks} == {-(-count // (rows * dp_size))}
    seen = []
    for step in zip(*ranks, strict=True):
        for tokens, targets in step:
            assert tokens.shape == targets.shape == (rows, S)
            counted = targets != IGNORE
            assert torch.equal(counted.all(1), counted.any(1))  # whole rows
            assert int(tokens.min()) >= 0
            rows_of_both = torch.cat([tokens[:, :1], targets], dim=1)
            seen += rows_of_both[counted[:, 0]].tolist()
    assert seen == [data.sources[0].window(w * S, S + 1).tolist() for w in range(count)]


def test_heldout_mixture_repeats_nothing(paths) -> None:
    data = opened({paths[0]: 0.5, paths[1]: 0.5}, "heldout")
    smaller = min((source.num_tokens - 1) // S for source in data.sources)
    options = {"seq_len": S, "num_samples": 10**9, "rows": 8}
    batches = list(heldout_batches(data, dp_rank=0, dp_size=1, **options))
    rows = [row.numpy().tobytes() for _, targets in batches for row in targets if row[0] != IGNORE]
    windows = [
        source.window(w * S + 1, S).astype(np.int64).tobytes()
        for source in data.sources
        for w in range((source.num_tokens - 1) // S)
    ]
    assert Counter(rows) <= Counter(windows)  # licences recur in the data itself
    assert 2 * smaller <= len(rows) <= 2 * smaller + 1
