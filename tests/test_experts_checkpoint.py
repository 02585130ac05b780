"""Checkpoints of models with experts: any layout loads what another saved, bit for bit, with the
biases of the routers."""

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel.memory import MOMENTS, WEIGHTS
from parallel.mesh import build_mesh
from runtime.checkpoints import checkpoint
from runtime.checkpoints.lease import Lease
from runtime.checkpoints.manifest import read_manifest
from runtime.checkpoints.save import Saver
from runtime.checkpoints.trainer_state import parse_trainer
from runtime.records.memory_report import held_bytes
from tests.runs import EXPERTS, copy_of, global_state, run, train_run, write_config
from tools import verify
from tools.ranks import Ranks
from training.build import build_stages
from training.load_config import load_config
from training.step import TrainStep

LAST = "run/checkpoints/step-00000003"
BIASES = {f"model.blocks.{layer}.feed_forward.router.bias" for layer in (1, 2, 3)}
LAYOUTS = {  # name: world, layout
    "ep 2": (8, ["parallel.ep=2", "parallel.tp=2", "parallel.pp=2"]),
    "ep 4": (8, ["parallel.ep=4", "parallel.tp=2", "parallel.pp=2"]),
    "ep 4, one stage": (4, ["parallel.ep=4", "parallel.tp=1", "parallel.pp=1"]),
    "ep 2 of cp": (4, ["parallel.ep=2", "parallel.cp=2", "parallel.tp=1", "parallel.pp=2"]),
    "replicas": (4, ["parallel.ep=2", "parallel.tp=2", "parallel.pp=1", "parallel.dp_replicate=2"]),
    "each expert cut": (8, ["parallel.ep=1", "parallel.tp=1", "parallel.pp=1",
                            "train.micro_batch_size=1"]),
    "zero_stage 0": (2, ["parallel.ep=1", "parallel.tp=1", "parallel.pp=1",
                         "parallel.dp_shard=1", "parallel.dp_replicate=2",
                         "parallel.zero_stage=0"]),
    "one rank": (1, ["parallel.ep=1", "parallel.tp=1", "parallel.pp=1"]),
}  # fmt: skip


def step_of(arguments: list[str]) -> TrainStep:
    """The training step of a configuration, on the ranks of this process group."""
    warnings.simplefilter("ignore")
    config = load_config(arguments[0], arguments[1:])
    sizes = config.parallel.mesh_sizes(dist.get_world_size())
    mesh = build_mesh(sizes, "cpu", config.model.has_experts)
    return TrainStep(config, mesh, build_stages(config, mesh))


@pytest.fixture(scope="module")
def saved(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 steps with experts, saved at ep 2."""
    folder = tmp_path_factory.mktemp("experts")
    given = {"interval": 3, "keep_last": 9}
    config = write_config(folder, data, model=EXPERTS, train={"steps": 3}, checkpoint=given)
    world, layout = LAYOUTS["ep 2"]
    run(ranks, world, config, *layout)
    return folder


@pytest.fixture(scope="module")
def state(ranks: Ranks, saved: Path) -> dict[str, torch.Tensor]:
    """Every tensor of that checkpoint."""
    world, layout = LAYOUTS["ep 2"]
    return ranks.run(global_state, world, [config_of(saved), *layout], str(saved / LAST))[0]


def config_of(folder: Path) -> str:
    return str(folder / "config.yaml")


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_holds_experts_and_biases(
    saved: Path, state: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = read_manifest(saved / LAST).tensors
    assert tensors.keys() == state.keys()
    assert tensors["model.blocks.3.feed_forward.experts.gate.weight"] == ("F32", (4, 16, 32))
    assert {name for name in tensors if "bias" in name} == BIASES, "biases have no moments"
    for name in BIASES:
        assert tensors[name] == ("F32", (4,))
        assert state[name].abs().amax() > 0, "three updates have changed it"
    moment = state["optimizer.blocks.1.feed_forward.experts.down.weight.exp_avg_sq"]
    assert (moment.amax((1, 2)) > 0).all(), "of every expert"
    assert verify.main([str(saved / "run")]) == 0
    assert "good" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        *("ep 4", "each expert cut"),
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("ep 4, one stage", "ep 2 of cp", "replicas", "zero_stage 0", "one rank")
        ),
    ],
)
def test_every_layout_loads_the_same_tensors(
    ranks: Ranks, saved: Path, state: dict[str, torch.Tensor], name: str
) -> None:
    world, layout = LAYOUTS[name]
    found = ranks.run(global_state, world, [config_of(saved), *layout], str(saved / LAST))[0]
    assert equal(found, state)


def save_again(arguments: list[str], path: str) -> None:
    """Load the checkpoint `path` and save it in the run folder of this configuration."""
    step = step_of(arguments)
    checkpoint.load(step, checkpoint.Start(Path(path), step=3, updates=3))
    tokenizer = next(Path(path).glob("tokenizer.*"))
    with Lease(step.config.run.dir, "cpu") as lease:
        saver = Saver(step, tokenizer, lease)
        saver.save(3, 0, {"checksum": "none", "next_sample": 0, "skipped": []})
        saver.close()


@pytest.mark.thorough
def test_a_chain_of_layouts_changes_no_bit(
    ranks: Ranks, saved: Path, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """ep 2 → 4 → 1 → 2 → 4, each layout loading what the one before it saved."""
    path = saved / LAST
    for number, name in enumerate(("ep 4", "each expert cut", "ep 2 of cp", "ep 4, one stage")):
        world, layout = LAYOUTS[name]
        folder = tmp_path / str(number)
        ranks.run(save_again, world, [config_of(saved), *layout, f"run.dir={folder}"], str(path))
        path = folder / "checkpoints" / "step-00000003"
    world, layout = LAYOUTS["ep 2"]
    arguments = [config_of(saved), *layout]
    assert equal(ranks.run(global_state, world, arguments, str(path))[0], state)


def loaded_weights(arguments: list[str], path: str) -> tuple[dict[str, torch.Tensor], float]:
    """Load only the weights: the biases, and the largest moment."""
    step = step_of(arguments)
    checkpoint.load(step, checkpoint.Start(Path(path), weights_only=True))
    biases, largest = {}, 0.0
    for held in checkpoint.held_tensors(step):
        if held.name.endswith("bias"):
            biases[held.name] = held.tensor.to_local().clone()
        elif not held.of_model and held.tensor.to_local().numel():
            largest = max(largest, held.tensor.to_local().abs().max().item())
    return biases, largest


def test_weights_come_with_their_biases(
    ranks: Ranks, saved: Path, state: dict[str, torch.Tensor]
) -> None:
    """A new run that starts from weights gets the biases too, because they decide which experts
    these weights were trained for; its moments are new."""
    world, layout = LAYOUTS["ep 4, one stage"]
    results = ranks.run(loaded_weights, world, [config_of(saved), *layout], str(saved / LAST))
    for biases, largest_moment in results:
        assert equal(biases, {name: state[name] for name in BIASES})
        assert largest_moment == 0


@pytest.mark.parametrize(
    ("key", "value", "was"),
    [
        ("num_experts", 8, "4"),
        ("experts_per_token", 1, "2"),
        ("num_shared_experts", 2, "1"),
        ("num_dense_layers", 0, "1"),
        ("router_scale", 2.5, "1.0"),
    ],
)
def test_another_model_is_refused(
    ranks: Ranks, saved: Path, tmp_path: Path, key: str, value: float, was: str
) -> None:
    config, _ = copy_of(saved, tmp_path)
    (message,) = ranks.run(train_run, 1, [config, f"model.{key}={value}"])
    assert message.startswith(f"model.{key} = {value}")
    assert f"has model.{key}={was}" in message


def test_how_the_load_is_evened_may_change(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    """Auxiliary losses and the rate of biases are not stored. With rate 0 biases stay."""
    config, checkpoints = copy_of(saved, tmp_path)
    free = {"router_aux_weight", "router_z_weight", "router_bias_rate"}
    stored = parse_trainer(checkpoints / "step-00000003").model.keys()
    fields = {field.name for field in dataclasses.fields(load_config(config, []).model)}
    assert free <= fields - stored
    changed = [f"model.{key}=0" for key in sorted(free)]
    world, layout = LAYOUTS["ep 4, one stage"]
    run(ranks, world, config, *layout, *changed, "train.steps=5")
    found = [
        ranks.run(global_state, world, [config, *layout], str(checkpoints / name))[0]
        for name in ("step-00000003", "step-00000005")
    ]
    biases = [{name: each[name] for name in BIASES} for each in found]
    assert equal(*biases)
    assert not equal(*found)


def counted(arguments: list[str]) -> tuple[dict[str, int], int]:
    """The bytes that the memory report counts, and the numbers in this rank's weights."""
    step = step_of(arguments)
    return held_bytes(step), sum(w.sharded.to_local().numel() for w in step.weights)


def test_the_memory_report_counts_experts(ranks: Ranks, saved: Path) -> None:
    world, layout = LAYOUTS["ep 2"]
    for held, numbers in ranks.run(counted, world, [config_of(saved), *layout]):
        assert held[WEIGHTS] == 4 * numbers
        assert held[MOMENTS] == 8 * numbers
