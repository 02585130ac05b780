"""An optimizer whose states are not shaped like its weights is one file (row_wise.py): training,
checkpoints, the memory report and the planner ask it."""

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from costs.collectives import Call
from parallel.axes import MeshSizes
from parallel.memory import MOMENTS
from proofs.parity.cases import Case
from proofs.parity.run import assemble, error_of, expected, run_on_ranks
from runtime.checkpoint.verify import verify_checkpoint
from runtime.metrics.memory_report import held_bytes
from runtime.trainer_state import state_bytes
from settings.load import load_config
from tests import runs
from tests.counting import Listener
from tests.training.row_wise import Optimizer
from tools.plan.layout import Layout
from tools.plan.memory import Memory
from tools.plan.traffic import collectives
from training.optimizers import State, like


@contextmanager
def row_wise():
    """Whatever optimizer.name is."""
    with patch("training.optimizers.load_kind", lambda *kind: Optimizer):
        yield


@contextmanager
def without_sums():
    """Each rank takes the part of a row that it has for the whole row."""
    with row_wise(), patch.object(Optimizer, "sum_over_parts"):
        yield


def with_rows(function, *arguments):
    with row_wise():
        return function(*arguments)


def weights_after(ranks, case, how=row_wise):
    """All weights after three steps, the same in every replica."""
    shapes = {name: weight.shape for name, weight in expected(case, 0).weights.items()}
    found = ranks.run(run_on_ranks, case.world, case, 3, how)
    whole, spread = assemble([run.final_weights for run in found], shapes)
    assert spread == 0.0
    return whole


DENSE = Case(MeshSizes(dp_shard=2, tp=2))
# each expert is cut inside of its rows' dimension
EXPERTS = Case(MeshSizes(dp_shard=4), router="softmax", num_experts=2, experts_per_token=1)


def farthest(found, alone):
    return max(error_of(found[name], alone[name]) for name in alone)


@pytest.mark.parametrize("case", [DENSE, pytest.param(EXPERTS, marks=pytest.mark.thorough)])
def test_the_steps_are_those_of_one_device(ranks, case):
    """With a control, where axes cut rows: without the sums over a row's parts they are not."""
    alone = weights_after(ranks, replace(case, layout=MeshSizes()))
    assert farthest(weights_after(ranks, case), alone) < 1e-6, "moments are float32"
    if case == DENSE:
        assert farthest(weights_after(ranks, case, without_sums), alone) > 1e-6


@pytest.fixture(scope="module")
def saved(ranks, data, tmp_path_factory):
    """A run in float64 of 4 steps on tp 2 × dp 2, saved after the last. Its `row` is float32."""
    folder = tmp_path_factory.mktemp("rows")
    sections = {"train": {"steps": 4, "dtype": "float64"}, "checkpoint": {"interval": 4}}
    config = runs.write_config(folder, data, parallel={"tp": 2, "dp_shard": 2}, **sections)
    assert ranks.run(with_rows, 4, runs.train_run, [config]) == [""] * 4
    return folder


@pytest.mark.parametrize("overrides", [["parallel.tp=1", "parallel.pp=2"], ["parallel.tp=4"]])
def test_another_layout_loads_the_same_bits(ranks, saved, overrides):
    path = runs.checkpoint_of(saved, 4)
    arguments = [str(saved / "config.yaml"), *overrides, "parallel.dp_shard=-1"]
    state = ranks.run(with_rows, 4, runs.global_state, arguments, str(path))[0]
    assert runs.same_tensors(state, runs.stored_tensors(path))
    tensors = verify_checkpoint(path).tensors
    for name, (dtype, shape) in tensors.items():
        if name.endswith(".row"):
            weight = tensors[name.replace("optimizer.", "model.").removesuffix(".row")].shape
            assert (dtype, shape) == ("F32", weight[:1]), name
            assert state[name].max() > 0
    held = sum({"F32": 4, "F64": 8}[dtype] * math.prod(shape) for dtype, shape in tensors.values())
    assert with_rows(state_bytes, load_config(arguments[0], [])) == held


def train_with_narrow_rows(arguments):
    def states_of(weight):
        return {"momentum": like(weight), "row": State([0], torch.int8)}

    with row_wise(), patch.object(Optimizer, "states_of", staticmethod(states_of)):
        return runs.train_run(arguments)


def test_a_state_that_checkpoints_cannot_store_is_refused_at_the_start(ranks, data, tmp_path):
    config = runs.write_config(tmp_path, data, train={"steps": 1})
    (said,) = ranks.run(train_with_narrow_rows, 1, [config])
    assert "optimizer.name = 'adamw': checkpoints cannot store optimizer.embedding.weight." in said
    assert "row, which is torch.int8" in said


def held_and_planned(arguments):
    """What a rank holds, and what an update sends; and both as they are planned."""
    step = runs.step_of(arguments)
    for each in step.weights:
        each.parameter.grad = torch.zeros_like(each.parameter)
    with Listener(step.mesh) as listener:
        step.optimizer.step(0.0, torch.ones((), dtype=torch.float64), 0.0)
    layout = Layout.of_rank(step.config, dist.get_world_size(), dist.get_rank())
    seen = Counter(Call(each.axis, each.kind, each.bytes) for each in listener.collectives)
    return held_bytes(step)[MOMENTS], seen, Memory(layout).now[MOMENTS], collectives(layout)


def test_the_planned_bytes_are_those_held_and_sent(ranks, saved):
    config = [str(saved / "config.yaml")]
    of_adam = ranks.run(held_and_planned, 4, config)
    ours = ranks.run(with_rows, 4, held_and_planned, config)
    for (held, sent, planned, calls), adam in zip(ours, of_adam, strict=True):
        _, sent_by_adam, planned_of_adam, calls_of_adam = adam
        assert held == planned < 0.6 * planned_of_adam
        assert {call.axis for call in sent} == {"tp"}, "it cuts rows"
        assert calls - calls_of_adam == sent
        assert not sent_by_adam
