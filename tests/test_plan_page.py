"""Every figure on the pages about the planner is a result of the planner, or in a file written by a
benchmark."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from model.transformer import num_parameters
from tools.plan.hardware import GB, find_device
from tools.plan.layout import Layout
from tools.plan.peaks import peaks
from tools.plan.search import ALIKE, Found, search
from tools.plan.time import StepTime
from training.config import Config
from training.load_config import load_config

ROOT = Path(__file__).parent.parent
PAGES = ("planning", "plan_model", "plan_accuracy", "rules_of_thumb")
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in PAGES)
TEXT = " ".join(PAGE.split())


def configuration(name: str, keys: str = "") -> Config:
    return load_config(str(ROOT / "configs" / f"{name}.yaml"), keys.split())


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    )
    return found


def row(label: str) -> list[str]:
    """The cells after `label` in one of the pages' tables."""
    found = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", PAGE, re.MULTILINE)
    assert found, label
    return [cell.strip() for cell in found[1].split("|")]


# --- figures recorded by benchmarks ---------------------------------------------------------------


def test_how_far_it_is_off() -> None:
    memory, megatron = recorded("plan_memory"), recorded("plan_megatron")
    stated = f"{memory['largest_error']:.1%}"
    assert all(one["same_collectives"] for one in memory["rows"])
    label = (
        f"peak memory, {len(memory['rows'])} configurations over tp, cp, pp, dp, schedules, "
        "ZeRO stages, recomputation, dtypes"
    )
    assert row(label)[1] == f"{stated.replace('%', ' %')} at most"
    layouts = f"exactly, over {len(memory['rows'])} layouts"
    running = " ".join((ROOT / "docs" / "running.md").read_text(encoding="utf-8").split())
    assert f"within {stated} and on collectives {layouts}" in running
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"memory within {stated}, collectives {layouts}" in readme
    label = "MFU of Megatron-LM's five rows, one set of constants"
    assert row(label)[1] == f"{megatron['mean_error']:.1f} and {megatron['largest_error']:.1f}"
    comparable = recorded("plan_published")["summary"]["comparable"]
    assert (
        f"differs by {megatron['mean_error']:.1f} percentage points on average from Megatron-LM's "
        f"published rows, and by {comparable['mean']:.1f} from {comparable['rows']} comparable rows"
        in readme
    )
    published = recorded("plan_published")["summary"]["all"]
    assert row(f"MFU of {published['rows']} other published rows, the same constants")[1] == (
        f"{published['mean']:.1f} and {published['largest']:.1f}"
    )


# label and column of GPUs → the rows of the file
PUBLISHED: dict[tuple[str, str], list[tuple[object, ...]]] = {
    ("NeMo, GPT-3 175B, tp 4 × pp 8", "128, 2048 H100"): [
        ("NeMo", "175B", 128),
        ("NeMo", "175B", 2048),
    ],
    ("Llama 3 405B, tp 8 × pp 16", "8192, 16384 H100"): [
        ("Llama 3", "405B", 8192),
        ("Llama 3", "405B", 16384),
    ],
    ("the same with cp 16, 131,072 tokens", "16384 H100"): [("Llama 3", "405B", 16384, 131072)],
    ("NeMo 8B, cp 2; 70B, tp 4 × cp 2 × pp 4", "8, 64 H100"): [
        ("NeMo", "8B", 8),
        ("NeMo", "70B", 64),
    ],
    ("llm-foundry 70B, FSDP", "64 H100, 64 A100"): [
        ("llm-foundry", "70B", 64),
        ("llm-foundry A100", "70B", 64),
    ],
    ("llm-foundry 7B, FSDP", "8 H100, 8 A100"): [
        ("llm-foundry", "7B", 8),
        ("llm-foundry A100", "7B", 8),
    ],
    ("nanochat 1.9B, ZeRO-1", "8 H100"): [("nanochat", "1.9B", 8)],
    ("MoE folding, Mixtral 8x22B, tp 2 × pp 8, ep 8", "128, 1024 H100"): [
        ("MoE folding", "8x22B", 128, 4096, 8, 8, ""),
        ("MoE folding", "8x22B", 1024, 4096),
    ],
    ("MoE folding, Qwen2 57B, FSDP, ep 8", "64, 1024 H100"): [
        ("MoE folding", "57B", 64, 4096, 1, 8, ""),
        ("MoE folding", "57B", 1024, 4096, 1, 8, ""),
    ],
    ("Megatron 2022, 530B, tp 8 × pp 35", "280 A100"): [("Megatron 2022", "530B", 280)],
}


@pytest.mark.parametrize(("label", "gpus"), PUBLISHED)
def test_published_rows(label: str, gpus: str) -> None:
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for one in recorded("plan_published")["rows"]:
        # the first of several rows that differ in other settings
        named = one["system"], one["model"], one["gpus"]
        rows.setdefault(named, one)
        rows.setdefault((*named, one["seq_len"]), one)
        rows.setdefault((*named, one["seq_len"], one["pp"], one["ep"], one["apart"]), one)
    found = [rows[key] for key in PUBLISHED[label, gpus]]
    cells = [
        ", ".join(f"{one[key]:.1%}" for one in found) for key in ("published_mfu", "predicted_mfu")
    ]
    assert row(f"{label} | {gpus}")[:2] == cells


def test_how_far_comparable_rows_are() -> None:
    rows = [
        one
        for one in recorded("plan_published")["rows"]
        if not one["apart"] and "num_experts" not in one["dimensions"]
    ]
    off = [abs(one["predicted_mfu"] / one["published_mfu"] - 1) for one in rows]
    assert (
        f"{sum(one <= 0.1 for one in off)} of the {len(off)} comparable rows are nearer than that"
        in TEXT
    )
    *_, sixth, quarter = sorted(off)
    assert 0.14 <= sixth <= 0.18
    assert 0.23 <= quarter <= 0.27
    assert "131,072 tokens, is a quarter too low; the next is a sixth off" in TEXT


def test_what_follows() -> None:
    """The differences between published and planned MFU, in points, in the list below the table."""
    of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in recorded("plan_published")["rows"]:
        of.setdefault((one["system"], one["model"]), []).append(one)
    eager, compiled = (one["published_mfu"] for one in of["torchtitan", "8B"][:2])
    assert (
        f"torchtitan's 8B: {100 * (compiled - eager):.0f} points between eager and compiled" in TEXT
    )
    points = {
        key: max(100 * (one["published_mfu"] - one["predicted_mfu"]) for one in rows)
        for key, rows in of.items()
    }
    assert f"attention made for Hopper (NeMo's 8B, {points['NeMo', '8B']:.0f} points)" in TEXT
    assert f"(Megatron's 1T, {points['Megatron 2022', '1T']:.0f} points)" in TEXT


# --- rules of thumb for 8 A100 --------------------------------------------------------------------

A100 = (
    "train.seq_len=4096 train.global_batch_size=64 train.micro_batch_size=1 "
    "train.activation_checkpointing=selective "
    "model.vocab_size=32000 "
)
B7 = (
    A100 + "model.num_layers=32 model.dim=4096 model.num_heads=32 model.num_kv_heads=32 "
    "model.ffn_dim=11008 "
)
B13 = (
    A100 + "model.num_layers=40 model.dim=5120 model.num_heads=40 model.num_kv_heads=40 "
    "model.ffn_dim=13824 "
)
PIPELINE = "parallel.schedule=1f1b parallel.stages_per_rank=1 parallel.tp_pieces=1 "
B70 = A100 + PIPELINE + "parallel.tp=1 parallel.pp=1 "
B175 = (
    A100
    + PIPELINE
    + (
        "parallel.tp=8 parallel.pp=2 model.dim=12288 model.num_layers=96 model.num_heads=96 "
        "model.num_kv_heads=96 "
        "model.ffn_dim=32768 train.activation_checkpointing=full "
    )
)
GUIDES = {
    "7B, DDP": ("llama3_8b", 8,
                B7 + "parallel.dp_shard=1 parallel.dp_replicate=8 parallel.zero_stage=0",
                "{} GB: does not fit"),
    "7B, ZeRO-2": ("llama3_8b", 8, B7 + "parallel.zero_stage=2", "{} GB"),
    "7B, FSDP": ("llama3_8b", 8, B7 + "parallel.zero_stage=3", "{} GB, "),
    "13B, ZeRO-2": ("llama3_8b", 8, B13 + "parallel.zero_stage=2", "{} GB"),
    "13B, FSDP": ("llama3_8b", 8, B13 + "parallel.zero_stage=3", "{} GB"),
    "70B, FSDP": ("llama3_70b", 8, B70 + "parallel.zero_stage=3", "{} GB: "),
    "175B on 64: tp 8 × pp 2 × dp 4": ("llama3_70b", 64, B175 + "parallel.zero_stage=2",
                                       "with ZeRO-2 and everything recomputed, {} GB; "),
}  # fmt: skip


def planned_gigabytes(name: str, world: int, keys: str) -> float:
    return max(peaks(Layout(configuration(name, keys), world, 0))) / GB


@pytest.mark.parametrize("label", GUIDES)
def test_what_guides_say(label: str) -> None:
    name, world, keys, text = GUIDES[label]
    gigabytes = planned_gigabytes(name, world, keys)
    assert row(label)[1].startswith(text.format(f"{gigabytes:.0f}")), gigabytes


def test_what_rows_say_besides() -> None:
    first = planned_gigabytes("llama3_70b", 64, f"{B175} parallel.zero_stage=1")
    assert row("175B on 64: tp 8 × pp 2 × dp 4")[1].endswith(f"; with ZeRO-1 {first:.0f} GB")
    billions = num_parameters(configuration("llama3_70b", B70).model) / 1e9
    assert row("70B, FSDP")[1].endswith(f"16 × {billions:.1f} / 8 = {16 * billions / 8:.0f} GB")
    layouts = [
        Layout(configuration("llama3_8b", f"{B7} parallel.zero_stage={zero}"), 8, 0)
        for zero in (2, 3)
    ]
    two, three = (StepTime(layout, find_device("a100")).step_seconds for layout in layouts)
    assert row("7B, FSDP")[1].endswith(f"{three / two - 1:.0%} slower than ZeRO-2")


# --- results of the search ------------------------------------------------------------------------


def mfu(found: Found) -> str:
    return f"{found.time.mfu:.0%}"


@pytest.mark.thorough
def test_the_search_on_one_machine() -> None:
    found = [
        [*result.best, *result.also]
        for name in ("h100", "a100")
        for result in [search(configuration("llama3_8b"), 8, find_device(name))]
    ]
    best = [ranked[0] for ranked in found]
    assert row("8B | 8 H100, 8 A100") == [
        "tp 2 × FSDP 4, ZeRO-1, nothing recomputed (without tp: FSDP 8, ZeRO-2, 1 point less)",
        ", ".join(map(mfu, best)),
    ]
    for ranked in found:
        simple = next(
            one for one in ranked if (one.config.parallel.tp, one.config.parallel.pp) == (1, 1)
        )
        for one, layout in ((ranked[0], (2, 1, 4, 1)), (simple, (1, 1, 8, 2))):
            p = one.config.parallel
            assert (p.tp, p.pp, p.dp_shard, p.zero_stage) == layout
            assert one.config.train.activation_checkpointing == "none"
        assert round(100 * (ranked[0].time.mfu - simple.time.mfu)) == 1


@pytest.mark.slow
def test_the_search_on_more() -> None:
    small = search(configuration("llama3_8b"), 64, find_device("h100")).best[0]
    parallel, train = small.config.parallel, small.config.train
    assert (parallel.dp_shard, parallel.zero_stage, train.activation_checkpointing) == (
        64,
        1,
        "selective",
    )
    assert row("8B | 64 H100") == ["FSDP 64, ZeRO-1, selective recomputation", mfu(small)]
    for name, layout in (
        ("h100", (4, 4, 4, "interleaved_1f1b", 1)),
        ("a100", (8, 4, 2, "interleaved_1f1b", 1)),
    ):
        best = search(configuration("llama3_70b"), 64, find_device(name)).best[0]
        p = best.config.parallel
        assert (p.tp, p.pp, p.dp_shard, p.schedule, p.zero_stage) == layout
        assert row(f"70B | 64 {name.upper()}")[1] == mfu(best)


def test_the_70b_configuration_is_as_fast_as_the_fastest_layout() -> None:
    """The page has the step times of the 70B configuration, and of it with tp 8 × pp 2. The step
    time of the fastest layout that the search found is recorded in the benchmark's file; the
    configuration's is nearer to it than the search tells apart."""
    found = next(
        one for one in recorded("plan_search")["rows"] if (one["name"], one["gpus"]) == ("70B", 256)
    )
    none = "parallel.tp=8 parallel.pp=2 train.activation_checkpointing=none"
    two = f"{none} train.micro_batch_size=2 parallel.stages_per_rank=20"
    layouts = [
        Layout(configuration("llama3_70b", keys), 256, 0)
        for keys in ("", "parallel.tp=8 parallel.pp=2", none, two, "parallel.tp_pieces=1")
    ]
    device = find_device("h100")
    seconds = [StepTime(layout, device).step_seconds for layout in layouts]
    best = found["best_step_seconds"]
    assert best <= seconds[0] <= (1 + ALIKE) * best < seconds[1]  # the last is a control
    first, wide, nothing, pairs, whole = (f"{one:.1f} s" for one in seconds)
    assert f"tp 4 × pp 4 first ({first} per step)" in TEXT
    assert f"With tp 8 × pp 2 instead, it takes {wide}, because" in TEXT
    assert f"to recompute nothing ({nothing})" in TEXT
    assert f"are large enough again ({pairs}), but less than 1 GB stays free" in TEXT
    assert f"with 1, it takes {whole}" in TEXT
    assert 0 <= device.room - max(peaks(layouts[3])) < GB
    assert max(peaks(layouts[2])) <= device.room
