"""A prepared folder reads as one sequence of tokens, and a damaged one is refused with the name of
the file."""

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from data.config import DataConfig
from data.dataset import Mixture, TokenDataset, open_data
from data.prepare import prepare
from data.shards import MAX_HEADER_BYTES, map_tensor, read_header
from data.tokenizer import Tokenizer
from errors import UserError
from tests.data_samples import SOURCE, STDLIB_FOLDER, flip_a_bit, prepared, tokenizer


@pytest.fixture
def folder(data: Path, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(data, tmp_path / "prepared"))


def whole(folder: Path, split: str) -> np.ndarray:
    shards = json.loads((folder / "index.json").read_text())["splits"][split]["shards"]
    return np.concatenate(
        [safetensors.numpy.load_file(folder / shard["file"])["tokens"] for shard in shards]
    )


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_windows_are_slices_of_the_whole(folder: Path, split: str) -> None:
    data, tokens = TokenDataset.open(folder, split), whole(folder, split)
    assert data.num_shards >= 2
    assert data.num_tokens == len(tokens)
    boundary = data._starts[1]
    special = [boundary - 150, boundary - 300, boundary, len(tokens) - 300]
    starts = np.array([*range(0, len(tokens) - 300, 997), *special])
    for start in starts.tolist():
        assert np.array_equal(data.window(start, 300), tokens[start : start + 300])
    assert np.array_equal(data.gather(starts, 300), np.stack([tokens[s : s + 300] for s in starts]))
    assert np.array_equal(data.window(0, len(tokens)), tokens)  # across every shard
    assert np.array_equal(data.gather(np.array([0]), len(tokens))[0], tokens)
    for start, length in ((-1, 2), (len(tokens) - 1, 2), (0, len(tokens) + 1)):
        with pytest.raises(IndexError):
            data.window(start, length)


def test_document_starts_are_where_bos_is(folder: Path) -> None:
    data = TokenDataset.open(folder, "train")
    first = 0
    for shard in range(data.num_shards):
        starts = data.document_starts(shard)
        tokens = data.window(first, data._starts[shard + 1] - first)
        assert np.array_equal(np.flatnonzero(tokens == tokenizer().bos_id), starts)
        first = data._starts[shard + 1]


def test_opening_reads_no_tokens(folder: Path) -> None:
    """Opening reads no tokens, so it does not notice changed content of the same size. `verify`
    does, and names the file."""
    TokenDataset.open(folder, "train").verify()
    flip_a_bit(folder / "train-00001.safetensors", 600)
    data = TokenDataset.open(folder, "train")
    with pytest.raises(UserError, match=r"train-00001\.safetensors.*sha256"):
        data.verify()
    TokenDataset.open(folder, "heldout").verify()


def change_index(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(content | changes))


def becomes(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "index.json").write_text(content)


def leads_outside(folder: Path) -> None:
    splits = json.loads((folder / "index.json").read_text())["splits"]
    splits["train"]["shards"][0]["file"] = "../prepared/train-00000.safetensors"
    change_index(folder, splits=splits)


def truncate(folder: Path, keep: int) -> None:
    shard = folder / "train-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"{keep} bytes of a shard": (partial(truncate, keep=keep),
                                    r"train-00001\.safetensors.*truncated")
       for keep in (0, 4, 100, 600, -1)},
    "no folder": (shutil.rmtree, "no prepared data"),
    "no shard": (lambda f: (f / "train-00002.safetensors").unlink(),
                 r"train-00002\.safetensors.*missing"),
    "an empty index": (becomes(""), "damaged"),
    "a list": (becomes("[]"), "not a lattice"),
    "no format": (becomes("{}"), "not a lattice"),
    "another version": (becomes('{"format": "lattice-tokens", "version": 2}'), "version"),
    "parts of the index missing": (
        partial(change_index, splits={"train": {"shards": [{"file": "x"}]}}), "damaged"),
    "a file outside": (leads_outside, "missing"),
    "another dtype": (partial(change_index, dtype="float64"), "float64"),
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


def test_shard_of_the_right_size_with_another_header_is_refused(folder: Path) -> None:
    shard = folder / "train-00000.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b'"U16"', b'"I16"'))
    data = TokenDataset.open(folder, "train")
    with pytest.raises(UserError, match=r"train-00000\.safetensors.*damaged"):
        data.window(0, 10)


def header_file(
    path: Path, header: bytes, length: int | None = None, data: bytes = bytes(64)
) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(**changes) -> bytes:
    tensor = {"dtype": "U16", "shape": [32], "data_offsets": [0, 64]}
    return json.dumps({"tokens": tensor | changes}).encode()


HOSTILE_HEADERS = {
    "length beyond the file": (entry(), 10**6),
    "length of 2**64 - 1": (entry(), 2**64 - 1),
    "length zero": (entry(), 0),
    "length cuts the JSON": (entry(), 20),
    "no JSON": (b"\x80\x04pickle", None),
    "a list": (b"[1, 2]", None),
    "an entry that is a number": (b'{"tokens": 3}', None),
    "no offsets": (b'{"tokens": {"dtype": "U16", "shape": [32]}}', None),
    "three offsets": (entry(data_offsets=[0, 1, 2]), None),
    "offsets that are text": (entry(data_offsets=["0", "64"]), None),
    "offsets beyond the file": (entry(shape=[64], data_offsets=[0, 128]), None),
    "offsets reversed": (entry(data_offsets=[64, 0]), None),
    "negative offset": (entry(data_offsets=[-64, 0]), None),
    "negative shape": (entry(shape=[-32]), None),
    "shape that is a float": (entry(shape=[32.0]), None),
    "shape that is true": (entry(shape=[True]), None),
    "nested without end": (b"[" * 100_000, None),
    "huge header": (b" " * (MAX_HEADER_BYTES + 1), None),
}


@pytest.mark.parametrize(("header", "length"), HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS.keys())
def test_hostile_headers_are_refused(tmp_path, header: bytes, length: int | None) -> None:
    path = header_file(tmp_path / "x.safetensors", header, length)
    with pytest.raises(UserError, match=r"x\.safetensors.*damaged"):
        read_header(path)


@pytest.mark.parametrize(
    "changes",
    [{"shape": [31]}, {"shape": [8, 4]}, {"dtype": "U32"}, {"dtype": "U8"},
     {"data_offsets": [0, 62]}, {}],
    ids=str,
)  # fmt: skip
def test_tensor_that_is_not_what_the_index_says_is_refused(tmp_path, changes: dict) -> None:
    path = header_file(tmp_path / "x.safetensors", entry(**changes))
    if not changes:  # control
        assert len(map_tensor(path, "tokens", np.dtype("uint16"), 32)) == 32
        return
    with pytest.raises(UserError, match="but the index lists"):
        map_tensor(path, "tokens", np.dtype("uint16"), 32)


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.train(["some other text to learn from"], 280)


def test_another_tokenizer_is_refused(folder: Path, small: Tokenizer, tmp_path) -> None:
    other = tmp_path / "other.model"
    other.write_bytes(small.model)
    open_data(DataConfig(path=str(folder), tokenizer=str(folder / "tokenizer.model")), "train")
    with pytest.raises(UserError) as raised:
        open_data(DataConfig(path=str(folder), tokenizer=str(other)), "train")
    assert raised.value.key == "data.tokenizer"


def test_mixture_of_different_vocabularies_is_refused(
    folder: Path, small: Tokenizer, tmp_path
) -> None:
    prepare(SOURCE, small, tmp_path / "other")
    with pytest.raises(UserError, match="different tokenizers"):
        open_data(DataConfig(path={str(folder): 1.0, str(tmp_path / "other"): 1.0}), "train")


def test_checksum_follows_the_content_not_the_place(folder: Path, tmp_path) -> None:
    again = TokenDataset.open(prepared(tmp_path / "again"), "train")
    one = TokenDataset.open(folder, "train")
    other = TokenDataset.open(prepared(tmp_path / "xml", str(STDLIB_FOLDER / "xml")), "train")
    assert one.checksum == again.checksum
    assert len({one.checksum, other.checksum, TokenDataset.open(folder, "heldout").checksum}) == 3
    ways = [([one, other], [1, 1]), ([other, one], [1, 1]), ([one, other], [1, 2])]
    assert len({Mixture(*way).checksum for way in ways}) == 3
    assert Mixture([one], [1]).checksum == Mixture([one], [2]).checksum == one.checksum


def test_more_shards_than_file_descriptors(tmp_path, monkeypatch) -> None:
    folder = prepared(
        tmp_path / "many", str(STDLIB_FOLDER / "encodings"), shard_tokens=1, heldout_fraction=0.05
    )
    tokens = whole(folder, "train")
    starts = np.arange(0, len(tokens) - 65, 64)
    expected = np.stack([tokens[s : s + 65] for s in starts])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 40, hard))
    try:
        monkeypatch.setattr("data.dataset.OPEN_SHARDS", 16)
        data = TokenDataset.open(folder, "train")
        assert data.num_shards > 80
        assert np.array_equal(data.gather(starts, 65), expected)
        del data
        # control: without the limit, one memory map per shard is too many
        monkeypatch.setattr("data.dataset.OPEN_SHARDS", None)
        data = TokenDataset.open(folder, "train")
        with pytest.raises((OSError, UserError), match="open files"):
            data.gather(starts, 65)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
