"""Runs are resumed: in the layout that saved bit for bit, in any other with the same numbers; any
layout loads the same tensors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import train
from proofs.ranks import Ranks
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.load import load
from runtime.checkpoint.save import Saver
from runtime.log.run_log import RunLog
from runtime.trainer_state import DataState, Start, held_tensors
from tests.planted import planted
from tests.runs import (
    checkpoint_of,
    copy_of,
    evaluations,
    forget_last,
    global_state,
    losses,
    messages,
    run,
    same_tensors,
    saved_start,
    step_of,
    stored_tensors,
    train_run,
    write_config,
)
from training.step import TrainStep

thorough = partial(pytest.param, marks=pytest.mark.thorough)


def layout(**axes: int) -> list[str]:
    """Overrides for a layout; an axis that is not named has size 1, dp_shard what is left."""
    given = {"pp": 1, "tp": 1, "cp": 1} | axes
    return [f"parallel.{axis}={size}" for axis, size in given.items()]


def label(value: object) -> str:
    """The id of a parameter."""
    return " ".join(value).replace("parallel.", "") if isinstance(value, list) else str(value)


@pytest.fixture(scope="module")
def saved_context(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in float64 of 4 steps on 4 ranks (cp 2 × tp 2) with several documents in a
    sequence and a window in every second layer, saved and evaluated after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("context")
    config = write_config(
        folder,
        data,
        model={"num_layers": 2, "attention": ["sliding_window", "causal"], "attention_window": 5},
        parallel={"cp": 2, "tp": 2},
        train={"steps": 4, "dtype": "float64", "eval_interval": 2, "eval_samples": 5},
        data={"document_mask": True},
        checkpoint={"interval": 2},
    )
    run(ranks, 4, config)
    return folder


@pytest.fixture(scope="module")
def runs(saved: Path, saved_context: Path, saved_experts: Path) -> dict[str, Path]:
    return {"dense": saved, "context": saved_context, "experts": saved_experts}


def test_a_run_is_that_of_one_rank(ranks: Ranks, saved_context: Path, tmp_path: Path) -> None:
    """The same tokens, so the same losses in training and in evaluation."""
    config = (saved_context / "config.yaml").read_text()
    path = tmp_path / "config.yaml"
    path.write_text(config.replace(str(saved_context), str(tmp_path)))
    run(ranks, 1, str(path), *layout(), "checkpoint.interval=never")
    assert losses(tmp_path) == pytest.approx(losses(saved_context), rel=1e-9)
    assert evaluations(tmp_path) == pytest.approx(evaluations(saved_context), rel=1e-9)
    assert evaluations(tmp_path).keys() == {2, 4}


@pytest.mark.parametrize(("name", "world"), [("context", 4), ("experts", 4), ("dense", 8)])
def test_a_run_is_resumed_bit_for_bit(
    ranks: Ranks, runs: dict[str, Path], tmp_path: Path, name: str, world: int
) -> None:
    saved = runs[name]
    config, checkpoints = copy_of(saved, tmp_path)
    last = max(checkpoints.glob("step-*")).name
    forget_last(tmp_path)
    run(ranks, world, config)
    assert losses(tmp_path) == losses(saved)
    assert evaluations(tmp_path) == evaluations(saved)
    theirs = stored_tensors(saved / "run" / "checkpoints" / last)
    assert same_tensors(stored_tensors(checkpoints / last), theirs)


def train_without(arguments: list[str], what: str) -> str:
    """Plant: the tensors whose names contain `what` are lost in loading."""

    @planted(train, "load")
    def without(load: Callable[..., None], step: TrainStep, start: Start) -> None:
        load(step, start)
        for held in held_tensors(step):
            if what in held.name:
                held.tensor.to_local().zero_()

    with without():
        return train_run(arguments)


@pytest.mark.parametrize(
    ("name", "what", "rel"), [("dense", "optimizer.", 1e-4), ("experts", "router.bias", 1e-9)]
)
def test_what_is_not_loaded_shows_in_the_losses(
    ranks: Ranks, runs: dict[str, Path], tmp_path: Path, name: str, what: str, rel: float
) -> None:
    """Control of the tests above and below."""
    config, _ = copy_of(runs[name], tmp_path)
    forget_last(tmp_path)
    assert ranks.run(train_without, 1, [config, *layout(ep=1)], what) == [""]
    ours, whole = losses(tmp_path), losses(runs[name])
    assert ours != pytest.approx(whole, rel=rel)


OTHERS = [
    ("context", 2, layout()),
    thorough("context", 4, layout(cp=4)),
    thorough("context", 4, layout(cp=2, pp=2)),
    thorough("context", 2, layout(tp=2)),
    thorough("context", 4, layout(pp=2, tp=2)),
    ("experts", 2, layout(tp=2, ep=2)),
    thorough("experts", 4, layout(ep=4)),
    thorough("experts", 2, layout(pp=2, ep=1)),
    thorough("experts", 8, layout(tp=2, ep=4, dp_replicate=2)),
]


@pytest.mark.parametrize(("name", "world", "overrides"), OTHERS, ids=label)
def test_a_run_is_resumed_in_another_layout(
    ranks: Ranks,
    runs: dict[str, Path],
    tmp_path: Path,
    name: str,
    world: int,
    overrides: list[str],
) -> None:
    """With the same tokens, so the same numbers but for rounding, and the same choices of experts,
    so equal biases."""
    saved = runs[name]
    config, _ = copy_of(saved, tmp_path)
    forget_last(tmp_path)
    run(ranks, world, config, *overrides)
    assert losses(tmp_path) == pytest.approx(losses(saved), rel=1e-9)
    assert evaluations(tmp_path) == pytest.approx(evaluations(saved), rel=1e-9)
    ours, theirs = (stored_tensors(checkpoint_of(folder, 4)) for folder in (tmp_path, saved))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs if n.endswith("router.bias"))


LOADS = [
    ("context", 4, layout(cp=4)),
    thorough("context", 4, layout()),
    thorough("context", 4, layout(cp=2, pp=2)),
    thorough("context", 1, layout()),
    thorough("experts", 4, layout(ep=4)),
    ("experts", 8, layout(ep=1)),  # each of 4 experts is cut
    thorough("experts", 8, layout(ep=4, tp=2, pp=2)),
    thorough("experts", 4, layout(ep=2, cp=2, pp=2)),
    thorough("experts", 4, layout(ep=2, tp=2, dp_replicate=2)),
    thorough("experts", 2, [*layout(ep=1, dp_shard=1, dp_replicate=2), "parallel.zero_stage=0"]),
    thorough("experts", 1, layout(ep=1)),
]


@pytest.mark.parametrize(("name", "world", "overrides"), LOADS, ids=label)
def test_every_layout_loads_the_same_tensors(
    ranks: Ranks, runs: dict[str, Path], name: str, world: int, overrides: list[str]
) -> None:
    """Weights, biases and moments, bit for bit."""
    path = checkpoint_of(runs[name], 4)
    more = ["data.document_mask=false", "train.micro_batch_size=1"]
    arguments = [str(runs[name] / "config.yaml"), *overrides, *more]
    expected = stored_tensors(path)
    assert same_tensors(ranks.run(global_state, world, arguments, str(path))[0], expected)
    assert any(t.abs().max() > 0 for n, t in expected.items() if n.endswith("exp_avg_sq"))


@pytest.mark.thorough
def test_other_models_too(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """Of tied embeddings, an uneven split of layers, and head norms shorter than dp_shard."""
    model = {"tie_embeddings": True, "qk_norm": True, "attention_dim": 8}
    config = write_config(
        tmp_path, data, model=model, checkpoint={"interval": 2}, train={"steps": 2}
    )
    run(ranks, 8, config, "parallel.tp=2", "parallel.pp=2", "parallel.layers_per_stage=[1, 3]")
    saved = checkpoint_of(tmp_path, 2)
    expected = stored_tensors(saved)
    for world, overrides in (
        (1, layout()),
        (8, layout(tp=2, pp=2)),
        (8, layout(tp=2)),
        (8, layout(pp=4, tp=2)),
        (4, [*layout(pp=2, stages_per_rank=2), "parallel.schedule=interleaved_1f1b"]),
        (4, layout(dp_replicate=2)),
    ):
        state = ranks.run(global_state, world, [config, *overrides], str(saved))[0]
        assert same_tensors(state, expected), overrides
    files = sorted(saved.glob("*.safetensors"))
    names = {key for file in files for key in safe_open(str(file), "pt").keys()}  # noqa: SIM118
    assert "model.blocks.3.attention.output.weight" in names, (
        "layers of the last stage too have global names"
    )
    assert "model.head.weight" not in names, "a tied weight is saved once"


def second_copies(arguments: list[str], path: str) -> list[bool]:
    """Load the checkpoint `path`; whether each second copy of a tensor is like the first."""
    step = step_of(arguments)
    load(step, saved_start(Path(path)))
    held = [(each.is_copy, each.name, each.tensor.to_local()) for each in held_tensors(step)]
    first = {name: tensor for is_copy, name, tensor in held if not is_copy}
    return [torch.equal(tensor, first[name]) for is_copy, name, tensor in held if is_copy]


def test_a_tied_weight_is_loaded_into_both_its_copies(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    """Of the weight and of its two moments, on a rank that has the first and the last stage."""
    sections = {"model": {"tie_embeddings": True, "num_layers": 1}, "train": {"steps": 1}}
    config = write_config(tmp_path, data, checkpoint={"interval": 1}, **sections)
    run(ranks, 1, config)
    assert ranks.run(second_copies, 1, [config], str(checkpoint_of(tmp_path, 1))) == [[True] * 3]


def save_again(arguments: list[str], path: str) -> None:
    """Load the checkpoint `path` and save it in the run folder of this configuration."""
    step = step_of(arguments)
    load(step, saved_start(Path(path)))
    tokenizer = next(Path(path).glob("tokenizer.*"))
    with Lease(step.config.run.dir, "cpu") as lease:
        saver = Saver(step, tokenizer, lease, RunLog(step.config))
        saver.save(4, 0, DataState(checksum="none", next_sample=0, skipped=[]))
        saver.close()


@pytest.mark.thorough
def test_a_chain_of_layouts_changes_no_bit(
    ranks: Ranks, saved_experts: Path, tmp_path: Path
) -> None:
    """ep 2 → 4 → 1 → 2 → 4, each layout loading what the one before it saved."""
    first = path = checkpoint_of(saved_experts, 4)
    config = str(saved_experts / "config.yaml")
    for number, (world, overrides) in enumerate(
        (
            (8, layout(ep=4, tp=2, pp=2)),
            (8, [*layout(ep=1), "train.micro_batch_size=1"]),
            (4, layout(ep=2, cp=2, pp=2)),
            (4, layout(ep=4)),
        )
    ):
        folder = tmp_path / str(number)
        ranks.run(save_again, world, [config, *overrides, f"run.dir={folder}"], str(path))
        path = folder / "checkpoints" / first.name
        assert same_tensors(stored_tensors(path), stored_tensors(first))


REFUSED = {  # changed key → its other value, and what the checkpoint has
    "attention": ("context", "causal", "('sliding_window', 'causal')"),
    "num_experts": ("experts", 8, "4"),
    "experts_per_token": ("experts", 1, "2"),
    "num_shared_experts": ("experts", 2, "1"),
    "num_dense_layers": ("experts", 0, "1"),
    "router_scale": ("experts", 2.5, "1.0"),
}


@pytest.fixture(scope="module")
def refusals(ranks: Ranks, runs: dict[str, Path]) -> dict[str, str]:
    cases = {
        key: [str(runs[name] / "config.yaml"), *layout(ep=1), f"model.{key}={value}"]
        for key, (name, value, _) in REFUSED.items()
    }
    return ranks.run(messages, 1, cases)[0]


@pytest.mark.parametrize("key", REFUSED)
def test_another_model_is_refused(refusals: dict[str, str], key: str) -> None:
    _, value, was = REFUSED[key]
    assert refusals[key].startswith(f"model.{key} = {value!r}")
    assert f"has model.{key}={was}" in refusals[key]
