"""Complete runs: the files they write, resuming, other layouts, and other arithmetic."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from safetensors import safe_open

from runtime.checkpoints import manifest
from runtime.checkpoints.manifest import read_manifest
from tests.runs import (
    copy_of,
    forget_step_6,
    fresh,
    global_state,
    losses,
    metrics_of,
    run,
    status_of,
    train_run,
    write_config,
)
from tools.ranks import RankError, Ranks


def test_a_run_leaves_what_it_promises(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        data,
        parallel={"tp": 2, "pp": 2},
        train={"eval_interval": 3},
        checkpoint={"interval": 3},
    )
    run(ranks, 8, config)
    folder = tmp_path / "run"
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    keys = {"loss", "grad_norm", "lr", "tokens", "tokens_per_second",
            "tokens_per_second_per_device", "mfu", "step_seconds"}  # fmt: skip
    assert all(keys | {"data_seconds", "peak_memory_bytes"} <= set(line) for line in lines)
    assert [line["tokens"] for line in lines] == [256 * (i + 1) for i in range(6)]
    assert [("eval_loss" in line) for line in lines] == [False, False, True, False, False, True]
    assert lines[-1]["loss"] < lines[0]["loss"], "it learns"
    assert status_of(tmp_path)["state"] == "finished"
    assert yaml.safe_load((folder / "config.yaml").read_text())["optimizer"]["eps"] == 1e-8, (
        "defaults are written out"
    )
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "latest",
        "step-00000003",
        "step-00000006",
    ]
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000006"


def test_evaluation_is_the_same_on_every_layout(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """The evaluation loss is the same in every layout. There are 5 held-out sequences, which no
    layout divides, so that padding must not count."""
    values = []
    for world, layout in (
        (1, []),
        (4, ["parallel.tp=2", "parallel.pp=2"]),
        (4, []),
        (8, ["parallel.pp=4"]),
    ):
        folder = tmp_path / f"{world}{len(layout)}"
        folder.mkdir()
        config = write_config(
            folder,
            data,
            train={"steps": 1, "eval_interval": 1, "eval_samples": 5, "dtype": "float64"},
        )
        run(ranks, world, config, *layout)
        values.append(metrics_of(folder)[0]["eval_loss"])
    assert max(values) - min(values) < 1e-9 * values[0]


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_resume_is_bitwise(ranks: Ranks, data: Path, tmp_path: Path, tied: bool) -> None:
    """A run of 6 steps and one whose last 3 steps were resumed from a checkpoint have bitwise equal
    losses."""
    sections = {
        "parallel": {"tp": 2, "pp": 2},
        "model": {"tie_embeddings": tied},
        "checkpoint": {"interval": 3},
    }
    config = write_config(tmp_path, data, **sections)
    run(ranks, 8, config)
    whole = losses(tmp_path)
    forget_step_6(tmp_path)
    run(ranks, 8, config)
    assert losses(tmp_path) == whole

    # Control: a resume that loses the moments is not bitwise.
    fresh(tmp_path)
    run(ranks, 8, config, "train.steps=3")
    saved = tmp_path / "run" / "checkpoints" / "step-00000003"
    other = tmp_path / "other"
    other.mkdir()
    config = write_config(other, data, **sections)
    run(ranks, 8, config, f"checkpoint.load_weights_only={saved}", "train.steps=3")
    assert losses(other)[1] != whole[4], "other data, and no moments"


@pytest.mark.thorough
def test_any_layout_loads_what_another_saved(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Weights and moments saved with (pp 2, dp 2, tp 2) load bit for bit in other layouts, with
    tied embeddings, an uneven split of layers, and head norms shorter than dp_shard."""
    model = {"tie_embeddings": True, "qk_norm": True, "attention_dim": 8}
    config = write_config(
        tmp_path, data, model=model, checkpoint={"interval": 2}, train={"steps": 2}
    )
    run(ranks, 8, config, "parallel.tp=2", "parallel.pp=2", "parallel.layers_per_stage=[1, 3]")
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    reference: dict[str, torch.Tensor] = {}
    for world, layout in (
        (1, []),
        (8, ["parallel.tp=2", "parallel.pp=2"]),
        (8, ["parallel.tp=2"]),
        (8, ["parallel.pp=4", "parallel.tp=2"]),
        (4, ["parallel.pp=2", "parallel.schedule=interleaved_1f1b", "parallel.stages_per_rank=2"]),
        (4, ["parallel.dp_replicate=2"]),
    ):
        state = ranks.run(global_state, world, [config, *layout], str(saved))[0]
        if not reference:
            reference = state
            assert any(t.abs().max() > 0 for n, t in state.items() if n.endswith("exp_avg_sq"))
        for name, tensor in reference.items():
            assert torch.equal(state[name], tensor), (layout, name)
    files = sorted(saved.glob("*.safetensors"))
    names = {key for file in files for key in safe_open(str(file), "pt").keys()}  # noqa: SIM118
    assert "model.blocks.3.attention.output.weight" in names, (
        "layers of the last stage too have global names"
    )
    assert "model.head.weight" not in names, "a tied weight is saved once"


@pytest.mark.thorough
def test_a_checkpoint_older_than_a_field_of_the_model(
    ranks: Ranks, saved: Path, tmp_path: Path
) -> None:
    """A checkpoint from before a field of the model existed has that field's default, which is how
    the model behaved. Any other value is refused as another model."""
    config, checkpoints = copy_of(saved, tmp_path)
    newest = checkpoints / "step-00000006"
    trainer = json.loads((newest / "trainer.json").read_text())
    for name in ("attention_dim", "qk_norm", "rope_scaling_factor"):
        del trainer["model"][name]
    (newest / "trainer.json").write_text(json.dumps(trainer))
    entries = read_manifest(newest)
    entries.files["trainer.json"] = manifest.fingerprint(newest / "trainer.json")
    manifest.write_manifest(newest, entries)
    message = ranks.run(train_run, 4, [config, "model.rope_scaling_factor=8"])[0]
    assert message.startswith("model.rope_scaling_factor = 8.0: the checkpoint ")
    assert "has model.rope_scaling_factor=1.0" in message
    assert "start a new run from its weights" in message
    run(ranks, 4, config, "train.steps=7")
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]


def test_resume_on_another_layout_reads_the_same_batches(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, data, train={"dtype": "float64"}, checkpoint={"interval": 3})
    run(ranks, 1, config)
    whole = losses(tmp_path)
    fresh(tmp_path)
    run(ranks, 8, config, "parallel.tp=2", "parallel.pp=2")
    forget_step_6(tmp_path)
    run(ranks, 4, config, "parallel.tp=2")
    for step, loss in losses(tmp_path).items():
        assert loss == pytest.approx(whole[step], rel=1e-9), step


def test_cpu_offload_clips_and_resumes(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, optimizer={"grad_clip": 0.2}, checkpoint={"interval": 3})
    run(ranks, 2, config)
    resident = losses(tmp_path)
    fresh(tmp_path)
    run(ranks, 2, config, "parallel.cpu_offload=true", "train.steps=6")
    assert losses(tmp_path) == resident
    forget_step_6(tmp_path)
    run(ranks, 2, config, "parallel.cpu_offload=true")
    assert losses(tmp_path) == resident


@pytest.mark.parametrize("steps", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_bfloat16_follows_float32(ranks: Ranks, data: Path, tmp_path: Path, steps: int) -> None:
    """The loss stays within 2% of float32's, with gradients reduced in float32 and in bfloat16."""
    config = write_config(tmp_path, data, train={"steps": steps, "micro_batch_size": 4})
    run(ranks, 2, config)
    exact = losses(tmp_path)
    for reduce_dtype in ("float32", "bfloat16"):
        fresh(tmp_path)
        overrides = [
            f"parallel.reduce_dtype={reduce_dtype}",
            "parallel.tp=2",
            "parallel.zero_stage=2",
        ]
        run(ranks, 2, config, "train.dtype=bfloat16", *overrides)
        rounded = losses(tmp_path)
        assert rounded != exact, "bfloat16 was not used"
        assert max(abs(rounded[s] / exact[s] - 1) for s in exact) < 0.02


@pytest.mark.parametrize(
    "zero_stage", [pytest.param(stage, marks=pytest.mark.thorough) for stage in (1, 2, 3)]
)
def test_bfloat16_with_split_backwards(
    ranks: Ranks, data: Path, tmp_path: Path, zero_stage: int
) -> None:
    """With bfloat16, weight gradients formed after backward reach the float32 sums like those
    formed in backward: losses and norms of schedules with a split backward agree with 1F1B's,
    within the rounding that any other split of the layers causes too."""
    config = write_config(
        tmp_path, data, train={"steps": 3, "dtype": "bfloat16", "micro_batch_size": 1}
    )
    layout = [
        "parallel.pp=2",
        "parallel.dp_replicate=2",
        f"parallel.zero_stage={zero_stage}",
        "parallel.tp=2",
    ]
    found = []
    for schedule, stages_per_rank in (("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)):
        fresh(tmp_path)
        run(
            ranks,
            8,
            config,
            *layout,
            f"parallel.schedule={schedule}",
            f"parallel.stages_per_rank={stages_per_rank}",
        )
        lines = metrics_of(tmp_path)
        found.append([(line["loss"], line["grad_norm"]) for line in lines])
    for other in found[1:]:
        for (loss, norm), (expected_loss, expected_norm) in zip(other, found[0], strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-3)
            assert norm == pytest.approx(expected_norm, rel=1e-2)


def train_traced(arguments: list[str]) -> str:
    """Train with blocks that the compiler captures, forward and backward, but does not translate to
    C++, which would take a minute."""
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return train_run(arguments)


@pytest.mark.parametrize(
    ("mode", "compiled_run"),
    [
        pytest.param("selective", train_traced, marks=pytest.mark.thorough),
        *(
            pytest.param(mode, train_run, marks=pytest.mark.thorough)
            for mode in ("none", "selective", "full")
        ),
    ],
)
def test_compiled_agrees(
    ranks: Ranks, data: Path, tmp_path: Path, mode: str, compiled_run: Callable[[list[str]], str]
) -> None:
    layout = ["parallel.dp_shard=2", f"train.activation_checkpointing={mode}"]
    # Blocks are compiled one by one, so two suffice. Evaluation runs them too.
    config = write_config(
        tmp_path, data, train={"steps": 3, "eval_interval": 3}, model={"num_layers": 2}
    )
    run(ranks, 2, config, *layout)
    eager = losses(tmp_path)
    fresh(tmp_path)
    assert ranks.run(compiled_run, 2, [config, *layout, "train.compile=true"]) == ["", ""]
    compiled = losses(tmp_path)
    assert all(math.isclose(compiled[s], eager[s], rel_tol=1e-5) for s in eager)


@pytest.mark.thorough
def test_weights_that_were_ruined_are_not_saved(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Weights that are no longer finite are not saved: each step multiplies them by a million, so
    that the loss of step 4, after which a save is due, is NaN."""
    ruinous = {"lr": 1e3, "weight_decay": 1e3, "warmup_steps": 0}
    config = write_config(
        tmp_path, data, checkpoint={"interval": 4}, optimizer=ruinous, guard={"max_bad_steps": 2}
    )
    with pytest.raises(RankError, match="no checkpoint to go back to"):
        run(ranks, 2, config, "parallel.tp=2")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert status_of(tmp_path)["state"] == "failed"


def test_a_second_run_in_the_same_folder_keeps_the_first_ones_numbers(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, data, train={"steps": 2})
    run(ranks, 1, config)
    first = (tmp_path / "run" / "metrics.jsonl").read_text()
    run(ranks, 1, config)
    assert (tmp_path / "run" / "metrics-1.jsonl").read_text() == first


def test_load_weights_only_starts_anew(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, checkpoint={"interval": 6})
    run(ranks, 2, config, "parallel.tp=2")
    saved = tmp_path / "run" / "checkpoints" / "step-00000006"
    other = tmp_path / "other"
    other.mkdir()
    # a resume would refuse these
    config = write_config(other, data, train={"seq_len": 16})
    longer = ["model.rope_theta=1e6", "model.rope_scaling_factor=2"]
    run(ranks, 2, config, f"checkpoint.load_weights_only={saved}", "parallel.pp=2", *longer)
    lines = losses(other)
    assert sorted(lines) == [1, 2, 3, 4, 5, 6]
    assert lines[1] < losses(tmp_path)[2], "it starts from trained weights"
