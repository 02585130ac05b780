"""Complete runs: the files they write, other layouts, and other arithmetic."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml

from proofs.ranks import Ranks
from runtime.checkpoint import manifest
from runtime.checkpoint.manifest import read_manifest
from tests.runs import (
    checkpoint_of,
    copy_of,
    evaluations,
    forget_last,
    fresh,
    losses,
    metrics_of,
    run,
    same_tensors,
    status_of,
    stored_tensors,
    train_run,
    write_config,
)

# --- what a run leaves ----------------------------------------------------------------------------


def test_a_run_logs_every_step(saved: Path) -> None:
    lines = metrics_of(saved)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    keys = {"loss", "grad_norm", "lr", "tokens", "tokens_per_second",
            "tokens_per_second_per_device", "mfu", "step_seconds", "data_seconds",
            "peak_memory_bytes"}  # fmt: skip
    assert all(keys <= set(line) for line in lines)
    assert [line["tokens"] for line in lines] == [256 * (i + 1) for i in range(6)]


def test_a_run_learns_and_finishes(saved: Path) -> None:
    assert losses(saved)[6] < losses(saved)[1]
    assert status_of(saved)["state"] == "finished"


def test_a_run_is_evaluated_when_it_is_due(saved: Path) -> None:
    assert evaluations(saved).keys() == {3, 6}


def test_a_run_leaves_its_whole_configuration(saved: Path) -> None:
    resolved = yaml.safe_load((saved / "run" / "config.yaml").read_text())
    assert resolved["optimizer"]["eps"] == 1e-8, "defaults are written out"


def test_a_run_leaves_its_checkpoints(saved: Path) -> None:
    checkpoints = saved / "run" / "checkpoints"
    names = ["latest", "step-00000002", "step-00000004", "step-00000006"]
    assert sorted(path.name for path in checkpoints.iterdir()) == names
    assert (checkpoints / "latest").read_text() == "step-00000006"


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


def test_load_weights_only_starts_anew(
    ranks: Ranks, saved: Path, data: Path, tmp_path: Path
) -> None:
    # a resume would refuse these
    config = write_config(tmp_path, data, train={"steps": 1, "seq_len": 16})
    longer = ["model.rope_theta=1e6", "model.rope_scaling_factor=2"]
    run(ranks, 2, config, f"checkpoint.load_weights_only={checkpoint_of(saved, 6)}", *longer)
    assert losses(tmp_path).keys() == {1}
    assert losses(tmp_path)[1] < losses(saved)[2], "it starts from trained weights"


# --- other arithmetic -----------------------------------------------------------------------------


def test_cpu_offload_clips_and_resumes(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """From what a resident run saved, it computes and saves the same, bit for bit."""
    sections = {"optimizer": {"grad_clip": 0.2}, "train": {"steps": 4}, "model": {"num_layers": 2}}
    config = write_config(tmp_path, data, checkpoint={"interval": 2}, **sections)
    run(ranks, 2, config)
    resident, last = losses(tmp_path), checkpoint_of(tmp_path, 4)
    saved = stored_tensors(last)
    forget_last(tmp_path)
    run(ranks, 2, config, "parallel.cpu_offload=true")
    assert losses(tmp_path) == resident
    assert same_tensors(stored_tensors(last), saved)


@pytest.fixture(scope="module", params=[3, pytest.param(50, marks=pytest.mark.slow)])
def exact(
    request: pytest.FixtureRequest,
    ranks: Ranks,
    data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, dict[int, float]]:
    """A configuration, and the losses of its run in float32."""
    folder = tmp_path_factory.mktemp("exact")
    train, model = {"steps": request.param, "micro_batch_size": 4}, {"num_layers": 2}
    config = write_config(folder, data, train=train, model=model)
    run(ranks, 2, config)
    return config, losses(folder)


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_bfloat16_follows_float32(
    ranks: Ranks, exact: tuple[str, dict[int, float]], tmp_path: Path, reduce_dtype: str
) -> None:
    """The loss stays within 2% of float32's."""
    config, expected = exact
    layout = ["parallel.tp=2", "parallel.zero_stage=2", f"parallel.reduce_dtype={reduce_dtype}"]
    run(ranks, 2, config, "train.dtype=bfloat16", *layout, f"run.dir={tmp_path / 'run'}")
    rounded = losses(tmp_path)
    assert rounded != expected, "bfloat16 was not used"
    assert max(abs(rounded[s] / expected[s] - 1) for s in expected) < 0.02


@pytest.mark.thorough
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bfloat16_with_split_backwards(
    ranks: Ranks, data: Path, tmp_path: Path, zero_stage: int
) -> None:
    """With bfloat16, weight gradients formed after backward reach the float32 sums like those
    formed in backward: losses and norms of schedules with a split backward agree with 1F1B's,
    within the rounding that any other split of the layers causes too."""
    train = {"steps": 3, "dtype": "bfloat16", "micro_batch_size": 1}
    sizes = {"pp": 2, "dp_replicate": 2, "tp": 2, "zero_stage": zero_stage}
    config = write_config(tmp_path, data, train=train, parallel=sizes)
    found = []
    for schedule, stages_per_rank in (("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)):
        fresh(tmp_path)
        stages = f"parallel.stages_per_rank={stages_per_rank}"
        run(ranks, 8, config, f"parallel.schedule={schedule}", stages)
        found.append([(line["loss"], line["grad_norm"]) for line in metrics_of(tmp_path)])
    for other in found[1:]:
        for (loss, norm), (expected_loss, expected_norm) in zip(other, found[0], strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-3)
            assert norm == pytest.approx(expected_norm, rel=1e-2)


def train_traced(arguments: list[str]) -> str:
    """Train with blocks that the compiler captures, forward and backward, but does not translate to
    C++, which would take a minute."""
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return train_run(arguments)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "compiled_run"),
    [("selective", train_traced), *((mode, train_run) for mode in ("none", "selective", "full"))],
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
