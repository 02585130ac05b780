"""The planner's search counts few layouts exactly, with few micro-batches each; neither changes its
result."""

import itertools
from dataclasses import replace
from statistics import median

import pytest

from errors import UserError
from hardware import H100
from parallel.pipeline.schedules import SCHEDULES, STAGES_PER_RANK
from settings.checks import validate
from settings.config import Config
from settings.layouts import valid_layout
from settings.load import load_config
from tools.plan.candidates import candidates
from tools.plan.layout import Layout
from tools.plan.memory import CHECKED, GROWING, Memory, batch_bytes, peaks, shortened
from tools.plan.search import Found, _error, check_before_search, describe_search, search

SMALL = (
    "model.dim=1024 model.num_heads=8 model.num_kv_heads=8 model.ffn_dim=2816 "
    "model.vocab_size=8192 train.seq_len=512 parallel.tp_pieces=1 "
    "train.activation_checkpointing=none"
)
STAGES = {name: (STAGES_PER_RANK.get(name, 2),) for name in SCHEDULES} | {
    "interleaved_1f1b": (2, 3)
}


def load(name: str, *keys: str) -> Config:
    """A configuration, with keys of which one text may have several."""
    return load_config(f"configs/{name}.yaml", " ".join(keys).split())


def job(schedule: str, pp: int, v: int, m: int, *keys: str) -> Layout:
    """A layout with `m` micro-batches of two sequences on `pp` stages, each sharded over two ranks.
    The last stage has one layer less than the others."""
    sizes = {"model.num_layers": 2 * pp * v - 1, "parallel.tp": 1, "parallel.pp": pp,
             "parallel.dp_shard": 2, "parallel.schedule": schedule, "parallel.stages_per_rank": v,
             "train.micro_batch_size": 2, "train.global_batch_size": 4 * m}  # fmt: skip
    given = (f"{key}={value}" for key, value in sizes.items())
    return Layout(load("llama3_70b", SMALL, *given, *keys), 2 * pp, 0)


def in_full(layout: Layout) -> list[int]:
    return [Memory(layout.at(rank)).peak for rank in range(layout.config.parallel.pp)]


# (zero_stage, recomputation, FSDP unit, dtype): every schedule is tested with each of these.
MODES = [
    (1, "full", "block", "float32"),
    (2, "none", "stage", "bfloat16"),
    (3, "selective", "block", "bfloat16"),
]


@pytest.mark.parametrize("schedule", STAGES)
@pytest.mark.parametrize(("zero", "mode", "unit", "dtype"), MODES)
def test_a_shortened_step_peaks_where_the_whole_one_does(
    schedule: str, zero: int, mode: str, unit: str, dtype: str
) -> None:
    keys = (f"parallel.zero_stage={zero} train.activation_checkpointing={mode} "
            f"parallel.fsdp_unit={unit} train.dtype={dtype} data.document_mask=true")  # fmt: skip
    for pp, v in itertools.product((2, 4), STAGES[schedule]):
        m = 6 * pp if schedule == "interleaved_1f1b" else 6 * pp + 1
        layout = job(schedule, pp, v, m, keys)
        assert list(peaks(layout)) == in_full(layout), (pp, v)


@pytest.mark.parametrize("schedule", ["dualpipe_v", "interleaved_1f1b", *GROWING])
def test_a_step_can_be_too_short(schedule: str) -> None:
    """Control: a step shortened to 2 · pp micro-batches has another peak for these schedules, even
    after correcting for the smaller batch."""
    layout = job(schedule, 4, STAGES[schedule][-1], 36, "parallel.zero_stage=2")
    short = shortened(layout, CHECKED)
    batch = batch_bytes(layout) - batch_bytes(short)
    assert [peak + batch for peak in in_full(short)] != in_full(layout)


def test_the_search_finds_the_fastest_of_all_that_fit() -> None:
    """In a space so small that every layout is counted and simulated, on a device in which half of
    the layouts fit. No bound exceeds what it bounds."""
    two_heads = "model.dim=256 model.num_heads=2 model.num_kv_heads=2"
    config = load("llama3_70b", SMALL, two_heads, "model.num_layers=4 train.global_batch_size=2")
    every = [(one.bound, Found(one.config(), 4, H100)) for one in candidates(config, 4, H100)]
    assert not [found for bound, found in every if bound > found.peak]
    room = median(found.peak for _, found in every)
    device = replace(H100, memory_bytes=H100.memory_bytes - H100.room + room)
    fit = [one for _, one in every if one.peak <= device.room]
    assert 0 < len(fit) < len(every)
    best = min(fit, key=lambda one: (one.seconds, one.peak))
    result = search(config, 4, device)
    found = result.best[0]
    assert (found.seconds, found.peak) == (best.seconds, best.peak)
    assert str(found) in describe_search(result)
    # if nothing fits, the error leads to a small layout, which needs more
    room = min(found.peak for _, found in every) - 1
    with pytest.raises(UserError, match=r"none of [\d,]+ layouts fits .* GB are needed") as refused:
        search(config, 4, replace(device, memory_bytes=device.reserved_bytes + room))
    overrides = refused.value.remedy.rpartition(": ")[2]
    assert overrides in {found.overrides() for _, found in every}


def test_where_states_alone_do_not_fit_no_layout_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 405 billion parameters on 8 GPUs the search refuses at once, because even the states do
    not fit. On 86 GPUs they do, but no layout fits, and the search looks at layouts."""
    config, looked = load("llama3_405b"), []
    monkeypatch.setattr("tools.plan.search.candidates", lambda *_: looked.append(1) or [])
    with pytest.raises(UserError, match=r"16 bytes a parameter, 6,494 GB: 812 GB on each GPU") as e:
        search(config, 8, H100)
    assert "more than 85 GPUs" in e.value.remedy
    assert not looked
    with pytest.raises(UserError, match=r"no layout of 86 GPUs"):
        search(config, 86, H100)
    assert looked.pop()
    with pytest.raises(UserError, match=r"no layout of 8 GPUs"):
        search(load("llama3_405b", "parallel.offload=host"), 8, H100)
    assert looked, "states in the host's memory may fit"


def test_a_large_batch_is_judged_with_its_layout() -> None:
    """21 million tokens are too many for one GPU, not for 64; of 4096 sequences, pipelines over 16
    GPUs would make more micro-batches than a run accepts."""
    check_before_search(load("llama3_8b", "train.seq_len=512", "train.global_batch_size=40960"))
    large = load("llama3_70b", "parallel.dp_shard=4", "train.global_batch_size=4096")
    with pytest.raises(UserError) as refused:
        validate(large, 64)
    found = _error(Found(large, 64, H100))
    assert (found.key, found.why) == (refused.value.key, refused.value.why)


@pytest.mark.thorough
def test_what_is_found_and_shown_for_8b_on_8_h100() -> None:
    """What is found fits, and is in order; estimates are near what is simulated, and the printed
    overrides lead to the layout. The configuration file is nearly as fast as the fastest. Of
    layouts that differ only in ZeRO stage or in how layers and ranks are divided, the fastest is
    shown. Control: with other checkpointing, a layout is another."""
    result = search(load("llama3_8b"), 8, H100)
    assert result.layouts > 5_000
    assert result.counted < result.layouts / 100, "few are counted exactly"
    assert [one.seconds for one in result.best] == sorted(one.seconds for one in result.best)
    for one in result.best:
        validate(one.config, 8)
        assert one.estimate == pytest.approx(one.seconds, rel=0.1)
        assert one.peak <= one.device.room
        assert load("llama3_8b", one.overrides()) == one.config
    best = result.best[0]
    assert Found(load("llama3_8b"), 8, H100).seconds < 1.05 * best.seconds
    assert len(result.as_dict()["best"]) == 10
    shown = [one for one in result.best if str(one) in describe_search(result)]
    assert shown[0] is best
    assert len(shown) < len(result.best)
    full = replace(best.config.train, activation_checkpointing="full")
    other = Found(replace(best.config, train=full), 8, best.device)
    rows = describe_search(replace(result, best=[best, best, other]))
    assert (rows.count(str(best)), rows.count(str(other))) == (1, 1)


@pytest.mark.thorough
def test_long_sequences_are_split_over_cp() -> None:
    """The search tries cp while a rank keeps 8,192 tokens of a sequence, and prefers it where the
    batch has fewer sequences than the world has GPUs. Bounds and estimates hold with cp, and the
    printed overrides lead to the layout. Control: in sequences of 8,192 tokens only cp 1 is
    tried."""
    one_head = "model.dim=128 model.num_heads=1 model.num_kv_heads=1"  # so that only tp 1 is tried
    keys = SMALL, one_head, "model.num_layers=2 train.global_batch_size=2 train.seq_len=32768"
    config = load("llama3_70b", *keys)
    found = list(candidates(config, 4, H100))
    assert {one.alike.parallel.cp for one in found} == {1, 2, 4}
    split = [one for one in found if one.alike.parallel.cp > 1]
    for one in split[:: len(split) // 10]:
        assert one.bound <= Found(one.config(), 4, H100).peak
    result = search(config, 4, H100)
    best = result.best[0]
    assert best.config.parallel.cp > 1
    assert best.estimate == pytest.approx(best.seconds, rel=0.1)
    assert f"cp {best.config.parallel.cp} × tp 1" in str(best)
    assert load("llama3_70b", *keys, best.overrides()) == best.config
    short = load("llama3_70b", *keys, "train.seq_len=8192")
    assert {one.alike.parallel.cp for one in candidates(short, 4, H100)} == {1}


def test_overrides_replace_a_list_of_layouts() -> None:
    key = 'parallel.layouts=[{"pp":2,"dp_shard":2,"tp":2}]'
    config = load("laptop", key, "train.micro_batch_size=8")
    parallel = replace(config.parallel, pp=1, dp_shard=8, tp=1)
    found = Found(replace(config, parallel=parallel), 8, H100)
    again, _ = valid_layout(load("laptop", key, found.overrides()), 8)
    assert again.parallel == replace(parallel, layouts=[])
