"""A prepared folder reads as one sequence of tokens, and a damaged one is refused with the name of
the file."""

import errno
import gc
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.numpy

from data.config import DataConfig
from data.dataset import Mixture, TokenDataset, open_data
from data.prepare import prepare
from data.shards import map_tokens
from data.tokenizer import Tokenizer
from errors import UserError
from tests.data_samples import SOURCE, prepared


@pytest.fixture
def folder(data: Path, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(data, tmp_path / "prepared"))


def whole(folder: Path, split: str) -> np.ndarray:
    shards = json.loads((folder / "index.json").read_text())["splits"][split]["shards"]
    return np.concatenate(
        [safetensors.numpy.load_file(folder / shard["file"])["tokens"] for shard in shards]
    )


def windows(data: TokenDataset, starts: np.ndarray, length: int) -> np.ndarray:
    return np.stack([data.window(start, length) for start in starts.tolist()])


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_windows_are_slices_of_the_whole(folder: Path, split: str) -> None:
    data, tokens = TokenDataset.open(folder, split), whole(folder, split)
    assert len(data._shards) >= 2
    assert data.num_tokens == len(tokens)
    boundary = data._starts[1]
    special = [boundary - 150, boundary - 300, boundary, len(tokens) - 300]
    starts = np.array([*range(0, len(tokens) - 300, 997), *special])
    expected = np.stack([tokens[start : start + 300] for start in starts])
    assert np.array_equal(windows(data, starts, 300), expected)
    assert np.array_equal(data.window(0, len(tokens)), tokens)  # across every shard


def change_index(folder: Path, old: str = "", new: str = "", **changes: object) -> None:
    content = json.loads((folder / "index.json").read_text().replace(old, new))
    (folder / "index.json").write_text(json.dumps(content | changes))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard cut short": (lambda f: os.truncate(f / "train-00001.safetensors", 600),
                          r"train-00001\.safetensors.* has 600 bytes"),
    "no folder": (shutil.rmtree, "no prepared data"),
    "no shard": (lambda f: (f / "train-00002.safetensors").unlink(),
                 r"train-00002\.safetensors.* has no bytes"),
    "an empty index": (lambda f: (f / "index.json").write_text(""), "damaged"),
    "a list": (lambda f: (f / "index.json").write_text("[]"), "not a lattice"),
    "another version": (lambda f: change_index(f, version=2), "version"),
    "parts of the index missing": (
        lambda f: change_index(f, splits={"train": {"shards": [{"file": "x"}]}}), "damaged"),
    "a file outside": (
        lambda f: change_index(f, "train-00000", "../prepared/train-00000"), "has "),
    "another dtype": (lambda f: change_index(f, dtype="float64"), "of dtype"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "why"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_folder_is_refused(
    folder: Path, damage: Callable[[Path], object], why: str
) -> None:
    damage(folder)
    with pytest.raises(UserError, match=why):
        TokenDataset.open(folder, "train")
    if "safetensors" in why:
        TokenDataset.open(folder, "heldout")  # the other split is whole


def tensor(**changes: object) -> bytes:
    entry = {"dtype": "U16", "shape": [32], "data_offsets": [0, 64]}
    return json.dumps({"tokens": entry | changes}).encode()


HOSTILE_HEADERS = {
    "length of 2**64 - 1": (b"{}", 2**64 - 1),
    "no JSON": (b"\x80\x04pickle", None),
    "no offsets": (b'{"tokens": {"dtype": "U16", "shape": [32]}}', None),
    "offsets beyond the file": (tensor(data_offsets=[64, 128]), None),
    "negative offset": (tensor(data_offsets=[-64, 0]), None),
    "nested without end": (b"[" * 100_000, None),
    "another shape": (tensor(shape=[8, 4]), None),
    "another dtype": (tensor(dtype="I16"), None),
}


@pytest.mark.parametrize("case", [*HOSTILE_HEADERS, "control"])
def test_hostile_headers_are_refused(tmp_path, case: str) -> None:
    path = tmp_path / "x.safetensors"
    header, length = HOSTILE_HEADERS.get(case, (tensor(), None))
    size = struct.pack("<Q", len(header) if length is None else length)
    path.write_bytes(size + header + bytes(64))
    if case == "control":
        assert len(map_tokens(path, np.dtype("uint16"), 32)) == 32
        return
    with pytest.raises(UserError, match=r"x\.safetensors.*damaged"):
        map_tokens(path, np.dtype("uint16"), 32)


def test_another_tokenizer_is_refused(folder: Path, tmp_path) -> None:
    small = Tokenizer.train(["some other text to learn from"], 280)
    other = tmp_path / "other"
    prepare(SOURCE, small, other)
    open_data(DataConfig(path=str(folder), tokenizer=str(folder / "tokenizer.model")), "train")
    with pytest.raises(UserError) as raised:
        open_data(DataConfig(path=str(folder), tokenizer=str(other / "tokenizer.model")), "train")
    assert raised.value.key == "data.tokenizer"
    with pytest.raises(UserError, match="different tokenizers"):
        open_data(DataConfig(path={str(folder): 1.0, str(other): 1.0}), "train")


def test_checksum_follows_the_content_not_the_place(data: Path, folder: Path) -> None:
    one, heldout = TokenDataset.open(data, "train"), TokenDataset.open(data, "heldout")
    assert TokenDataset.open(folder, "train").checksum == one.checksum
    change_index(folder, one._shards[0][-1], "0" * 64)
    other = TokenDataset.open(folder, "train")
    assert len({each.checksum for each in (one, heldout, other)}) == 3
    ways = [([one, other], [1, 1]), ([other, one], [1, 1]), ([one, other], [1, 2])]
    assert len({Mixture(*way).checksum for way in ways}) == 3
    assert Mixture([one], [1]).checksum == Mixture([one], [2]).checksum == one.checksum


def test_few_shards_are_open_at_a_time(tmp_path, monkeypatch) -> None:
    """A map of a shard holds a file descriptor, and a data set may have more than a process."""
    folder = prepared(tmp_path / "many", SOURCE, shard_tokens=1, heldout_fraction=0.0)
    tokens = whole(folder, "train")
    starts = np.arange(0, len(tokens) - 65, 64)
    expected = np.stack([tokens[s : s + 65] for s in starts])
    for most in (2, None):  # None: control, no limit
        monkeypatch.setattr("data.dataset.OPEN_SHARDS", most)
        data = TokenDataset.open(folder, "train")
        gc.collect()  # closes the files of an earlier one
        before = len(os.listdir("/dev/fd"))
        assert np.array_equal(windows(data, starts, 65), expected)
        opened = len(os.listdir("/dev/fd")) - before
        assert opened <= 2 if most else opened == len(data._shards) > 3, most
    # of all sources together
    monkeypatch.setattr("data.dataset.OPEN_SHARDS", 4)
    sources = [TokenDataset.open(folder, "train") for _ in range(2)]
    Mixture(sources, [1, 1])
    before = len(os.listdir("/dev/fd"))
    for source in sources:
        assert np.array_equal(windows(source, starts, 65), expected)
    assert len(os.listdir("/dev/fd")) - before == 4


def test_an_error_that_may_pass_is_no_refusal(tmp_path) -> None:
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    (tmp_path / "x.safetensors").write_bytes(bytes(64))
    with patch.object(Path, "open", side_effect=stale), pytest.raises(OSError, match=r"x\.safe"):
        map_tokens(tmp_path / "x.safetensors", np.dtype("uint16"), 32)
