"""Planned MFU and memory are near what others have published."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plan_megatron, plan_published
from benchmarks.plan_published import ROWS
from benchmarks.published_rows import Row
from tools.plan.hardware import DEVICES, GB, find_device
from tools.plan.layout import Layout
from tools.plan.memory import peaks
from training.load_config import load_config

CONFIGS = Path(__file__).parent.parent / "configs"


def test_megatrons_weak_scaling() -> None:
    mean, largest = plan_megatron.errors(plan_megatron.compare())
    assert mean <= plan_megatron.MEAN_LIMIT
    assert largest <= plan_megatron.LARGEST_LIMIT


QUICK_ROWS = [row for row in ROWS if row.pp == 1]  # no pipeline to simulate


def test_rows_it_was_not_fitted_on() -> None:
    """No constant was fitted to these published rows. The bounds leave room for a constant that
    suits other rows better."""
    assert all(row.system.source for row in ROWS)
    errors = [abs(error) for error in points(row for row in QUICK_ROWS if not row.apart)]
    assert statistics.fmean(errors) < 4.5
    assert max(errors) < 11


A100 = (
    "train.seq_len=4096 train.global_batch_size=64 train.micro_batch_size=1 "
    "train.activation_checkpointing=selective model.vocab_size=32000 "
)
B7 = f"{A100} model.dim=4096 model.num_layers=32 model.num_heads=32 model.ffn_dim=11008"
B13 = f"{A100} model.dim=5120 model.num_layers=40 model.num_heads=40 model.ffn_dim=13824"


@pytest.mark.parametrize(
    ("gigabytes", "keys"),
    [
        (38, f"{B7} model.num_kv_heads=32 parallel.zero_stage=2"),
        (35, f"{B7} model.num_kv_heads=32 parallel.zero_stage=3"),
        (48, f"{B13} model.num_kv_heads=40 parallel.zero_stage=3"),
    ],
    ids=["7B, ZeRO-2", "7B, FSDP", "13B, FSDP"],
)
def test_memory_is_about_what_guides_say(gigabytes: float, keys: str) -> None:
    """Of 8 A100, in docs/rules_of_thumb.md; not of the rows for which that page gives a reason to
    differ."""
    config = load_config(str(CONFIGS / "llama3_8b.yaml"), keys.split())
    assert max(peaks(Layout(config, 8, 0))) / GB == pytest.approx(gigabytes, rel=0.2)


def test_layouts_of_one_mixture_of_experts_are_planned_in_the_published_order() -> None:
    """From FSDP to a pipeline with expert parallelism, all with 256 sequences of 4,096 tokens; but
    not where only the cut of experts over tp, which Lattice does not have, makes the difference."""
    recorded = json.loads(plan_published.RESULTS.read_text(encoding="utf-8"))
    for model in ("8x22B", "57B", "8x70B"):
        rows = [
            (row["published_mfu"], row["predicted_mfu"])
            for row in recorded["rows"]
            if (row["model"], row["system"]) == (model, "MoE folding")
            and (row["global_batch_size"], row["seq_len"]) == (256, 4096)
            and not (model == "57B" and row["apart"] and row["ep"] > 1)
        ]
        assert len(rows) >= 3
        assert [planned for _, planned in sorted(rows)] == sorted(planned for _, planned in rows)


def test_a100_has_efficiencies_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The A100 needs its own efficiencies: with those of the H100, the errors of comparable A100
    rows more than double."""
    rows = [row for row in QUICK_ROWS if row.system.device == "a100" and not row.apart]
    of_its_own = mean_error(rows)
    h100, a100 = find_device("h100"), find_device("a100")
    fitted = {
        key: getattr(h100, key)
        for key in ("matmul_efficiency", "attention_efficiency", "memory_efficiency")
    }
    monkeypatch.setitem(DEVICES, "a100", replace(a100, **fitted))
    assert of_its_own < 4
    assert mean_error(rows) > 2 * of_its_own


def points(rows: Iterable[Row]) -> list[float]:
    return [plan_published.compare(row)["error_points"] for row in rows]


def mean_error(rows: list[Row]) -> float:
    return statistics.fmean(map(abs, points(rows)))
