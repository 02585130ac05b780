"""Runs with context parallelism evaluate, save, and resume in other layouts."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.runs import (
    batches_of,
    copy_of,
    evaluations,
    forget_step_6,
    global_state,
    losses,
    run,
    write_config,
)
from tools.ranks import Ranks

SAVED_AT = ["parallel.cp=2", "parallel.tp=2"]
OTHERS = [  # world, layout
    (4, ["parallel.cp=1", "parallel.tp=1", "parallel.dp_shard=4"]),
    (4, ["parallel.cp=4", "parallel.tp=1"]),
    (4, ["parallel.cp=2", "parallel.pp=2", "parallel.tp=1"]),
    (1, ["parallel.cp=1", "parallel.tp=1"]),
]


@pytest.fixture(scope="module")
def saved_with_cp(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps at cp 2 × tp 2, with checkpoints after steps 3 and 6."""
    folder = tmp_path_factory.mktemp("cp")
    config = write_config(
        folder,
        data,
        parallel={"cp": 2, "tp": 2},
        train={"dtype": "float64", "eval_interval": 3, "eval_samples": 5},
        checkpoint={"interval": 3},
    )
    text = Path(config).read_text()
    Path(config).write_text(text.replace("data:\n", "data:\n  document_mask: true\n"))
    run(ranks, 4, config)
    return folder


def test_a_run_is_that_of_one_rank(ranks: Ranks, saved_with_cp: Path, tmp_path: Path) -> None:
    """The same tokens, so the same losses in training and in evaluation."""
    config = (saved_with_cp / "config.yaml").read_text()
    path = tmp_path / "config.yaml"
    path.write_text(config.replace(str(saved_with_cp), str(tmp_path)))
    run(ranks, 1, str(path), "parallel.cp=1", "parallel.tp=1")
    assert losses(tmp_path) == pytest.approx(losses(saved_with_cp), rel=1e-9)
    assert evaluations(tmp_path) == pytest.approx(evaluations(saved_with_cp), rel=1e-9)
    assert evaluations(tmp_path).keys() == {3, 6}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (4, SAVED_AT),
        OTHERS[0],
        *(pytest.param(*other, marks=pytest.mark.thorough) for other in OTHERS[1:3]),
    ],
)
def test_it_resumes_in_another_layout(
    ranks: Ranks, saved_with_cp: Path, tmp_path: Path, world: int, layout: list[str]
) -> None:
    """With the same tokens: the losses are those of the undisturbed run, and in the same layout
    they are so bit for bit."""
    config, _ = copy_of(saved_with_cp, tmp_path)
    forget_step_6(tmp_path)
    run(ranks, world, config, *layout)
    whole = losses(saved_with_cp)
    assert losses(tmp_path) == (whole if layout == SAVED_AT else pytest.approx(whole, rel=1e-9))
    assert evaluations(tmp_path) == pytest.approx(evaluations(saved_with_cp), rel=1e-9)


def test_every_layout_loads_the_same_tensors(ranks: Ranks, saved_with_cp: Path) -> None:
    """Weights and moments, bit for bit."""
    arguments = [str(saved_with_cp / "config.yaml"), "data.document_mask=false"]
    checkpoint = str(saved_with_cp / "run" / "checkpoints" / "step-00000003")
    expected = ranks.run(global_state, 4, [*arguments, *SAVED_AT], checkpoint)[0]
    assert any(t.abs().max() > 0 for name, t in expected.items() if name.endswith("exp_avg_sq"))
    for world, layout in OTHERS:
        state = ranks.run(global_state, world, [*arguments, *layout], checkpoint)[0]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items()), layout


@pytest.mark.thorough
def test_from_cp_to_tp_to_one_rank(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """A run that goes on in two other layouts gets, in each, the tokens of an undisturbed run on
    one rank, bit for bit, and has its losses."""
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    for folder in (alone, moved):
        folder.mkdir()
        sections = {"train": {"dtype": "float64", "micro_batch_size": 1}}
        write_config(folder, data, checkpoint={"interval": 2, "keep_last": 9}, **sections)
    (expected,) = ranks.run(batches_of, 1, [str(alone / "config.yaml")])
    assert expected.keys() == set(range(6))
    assert not torch.equal(expected[0], expected[1])
    done = 0
    for layout in (["parallel.cp=2"], ["parallel.tp=2"], []):
        for batches in ranks.run(
            batches_of, len(layout) + 1, [str(moved / "config.yaml"), *layout]
        ):
            assert batches.keys() == set(range(done, 6))
            assert all(torch.equal(batches[step], expected[step]) for step in batches)
        done += 2
        if layout:  # as if the run had died after these steps
            for step in range(done + 2, 7, 2):
                shutil.rmtree(moved / "run" / "checkpoints" / f"step-{step:08}")
    assert losses(moved) == pytest.approx(losses(alone), rel=1e-9)
