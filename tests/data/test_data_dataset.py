"""A prepared folder reads as one sequence of tokens, and a damaged one is refused with the name of
the file."""

import errno
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
from tests.data_samples import SOURCE


@pytest.fixture
def folder(data: Path, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(data, tmp_path / "prepared"))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_windows_are_slices_of_the_whole(data: Path, split: str) -> None:
    before = len(os.listdir("/dev/fd"))
    dataset = TokenDataset.open(data, split)
    shards = [safetensors.numpy.load_file(file) for file in sorted(data.glob(f"{split}-*"))]
    tokens = np.concatenate([shard["tokens"] for shard in shards])
    assert len(shards) == len(dataset._shards) >= 2
    assert dataset.num_tokens == len(tokens)
    boundary = dataset._starts[1]
    special = [boundary - 150, boundary - 300, boundary, len(tokens) - 300]
    for start in [*range(0, len(tokens) - 300, 997), *special]:
        assert np.array_equal(dataset.window(start, 300), tokens[start : start + 300])
    assert np.array_equal(dataset.window(0, len(tokens)), tokens)  # across every shard
    assert len(os.listdir("/dev/fd")) <= before, "there may be more shards than descriptors"


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


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folder_is_refused(folder: Path, name: str) -> None:
    damage, why = DAMAGE[name]
    damage(folder)
    with pytest.raises(UserError, match=why):
        TokenDataset.open(folder, "train")
    if "safetensors" in why:
        TokenDataset.open(folder, "heldout")  # the other split is whole


def tensor(**changes: object) -> bytes:
    entry = {"dtype": "U16", "shape": [32], "data_offsets": [0, 64]}
    return json.dumps({"tokens": entry | changes}).encode()


@pytest.mark.parametrize(
    ("header", "why"),
    [(b"\x80\x04pickle", "invalid UTF-8"), (tensor(data_offsets=[64, 128]), "invalid offset"),
     (b"[" * 100_000, "invalid JSON"), (tensor(shape=[8, 4]), r"\[8, 4\]"),
     (tensor(dtype="BF16"), "BF16"), (tensor(), "")],
    ids=["no JSON", "offsets beyond the file", "nested without end", "another shape",
         "another dtype", "control"],
)  # fmt: skip
def test_hostile_headers_are_refused(tmp_path, header: bytes, why: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    if not why:
        assert map_tokens(path, np.dtype("uint16"), 32)[:].tolist() == [0] * 32
        return
    with pytest.raises(UserError, match=rf"x\.safetensors.*damaged.*{why}"):
        map_tokens(path, np.dtype("uint16"), 32)


def test_an_error_that_may_pass_is_no_refusal(tmp_path) -> None:
    with pytest.raises(UserError, match=r"x\.safetensors.*cannot be read \(No such"):
        map_tokens(tmp_path / "x.safetensors", np.dtype("uint16"), 32)
    (tmp_path / "x.safetensors").write_bytes(bytes(64))
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "x.safetensors")
    gone = FileNotFoundError("No such file")  # as safetensors says of any error
    for name, error in (("pathlib.Path.open", stale), ("data.shards.safe_open", gone)):
        with patch(name, side_effect=error), pytest.raises(type(error)) as raised:
            map_tokens(tmp_path / "x.safetensors", np.dtype("uint16"), 32)
        assert raised.value is error


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


def test_a_mixtures_unigram_loss_is_weighted(data: Path, folder: Path) -> None:
    change_index(folder, unigram_nats_per_token=9.0)
    one, other = TokenDataset.open(data, "train"), TokenDataset.open(folder, "train")
    one.unigram_nats_per_token = 6.0
    assert Mixture([one, other], [1, 2]).unigram_nats_per_token == pytest.approx(8.0)
