"""Planned MFU and memory are near what others have published."""

import pytest

from benchmarks import plan_accuracy
from benchmarks.plan_accuracy import FITTED, ROWS
from settings.load import load_config
from tools.plan.hardware import GB
from tools.plan.layout import Layout
from tools.plan.memory import peaks

QUICK_ROWS = [row for row in ROWS if row.pp == 1]  # no pipeline to simulate


def test_megatrons_weak_scaling() -> None:
    found = plan_accuracy.errors(FITTED)
    assert found["mean"] <= plan_accuracy.MEAN_LIMIT
    assert found["largest"] <= plan_accuracy.LARGEST_LIMIT


def test_rows_it_was_not_fitted_on() -> None:
    """No constant was fitted to these published rows. The bounds leave room for a constant that
    suits other rows better."""
    assert all(row.source for row in ROWS)
    found = plan_accuracy.errors(row for row in QUICK_ROWS if not row.apart)
    assert found["mean"] < 4.5
    assert found["largest"] < 11
    # the A100 has efficiencies of its own: with those of the H100, twice as much
    of_a100 = (row for row in QUICK_ROWS if row.device == "a100" and not row.apart)
    assert plan_accuracy.errors(of_a100)["mean"] < 4


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
    """Of 8 A100, in docs/plan_accuracy.md; not of the rows for which that page gives a reason to
    differ."""
    config = load_config("configs/llama3_8b.yaml", keys.split())
    assert max(peaks(Layout(config, 8, 0))) / GB == pytest.approx(gigabytes, rel=0.2)


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["Mixtral 8x22B", "Qwen2 57B", "Llama 3 8x70B"])
def test_layouts_of_one_mixture_of_experts_are_planned_in_the_published_order(model: str) -> None:
    """From FSDP to a pipeline with expert parallelism, all with 256 sequences of 4,096 tokens; but
    not where only the cut of experts over tp, which Lattice does not have, makes the difference."""
    rows = [
        row
        for row in ROWS
        if (row.model, row.name, row.batch, row.seq_len) == (model, "MoE folding", 256, 4096)
        and not (model == "Qwen2 57B" and row.apart and row.ep > 1)
    ]
    assert len(rows) >= 3
    found = sorted((row.published, row.planned) for row in rows)
    assert [planned for _, planned in found] == sorted(planned for _, planned in found)
