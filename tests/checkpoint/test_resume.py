"""Runs are resumed: in the layout that saved bit for bit, in any other with the same numbers; any
layout loads the same tensors."""

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import train
from data.dataset import open_data
from parallel.placement import local_region
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.load import load
from runtime.checkpoint.manifest import MANIFEST, read_manifest
from runtime.checkpoint.rollback import Rollback
from runtime.checkpoint.save import Saver
from runtime.checkpoint.verify import parse_trainer, verify_checkpoint
from runtime.log.events import read_events
from runtime.log.run_log import RunLog
from runtime.trainer_state import DataState, Start, held_tensors
from tests import runs
from tests.data_samples import flip_a_bit
from tests.health.faulty_runs import run_with_bad_steps
from tests.planted import planted
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
def saved_context(ranks, data, tmp_path_factory):
    """A finished run on 4 ranks, with a window and several documents in a sequence."""
    folder = tmp_path_factory.mktemp("context")
    window = {"attention": ["sliding_window", "causal"], "sliding_window": {"window": 5}}
    config = runs.write_config(
        folder, data, model={"num_layers": 2, **window}, parallel={"cp": 2, "tp": 2},
        train={"steps": 4, "dtype": "float64", "eval_interval": 2, "eval_samples": 5},
        data={"document_mask": True}, checkpoint={"interval": 2},
    )  # fmt: skip
    runs.run(ranks, 4, config)
    return folder


@pytest.fixture
def before(request, name) -> Path:
    """The run with this name, of the fixture `saved_NAME`."""
    return request.getfixturevalue({"dense": "saved"}.get(name, f"saved_{name}"))


RESUMED = [  # a run, ranks, overrides, and how far numbers may be apart
    thorough("context", 4, [], 0.0),
    ("experts", 4, [], 0.0),
    ("dense", 8, ["checkpoint.async_save=false"], 0.0),
    thorough("context", 2, layout(), 1e-9),
    thorough("experts", 4, layout(cp=2, pp=2, ep=2), 1e-9),
    ("experts", 2, layout(tp=2, ep=2), 1e-9),
    thorough("experts", 8, layout(tp=2, ep=4, dp_replicate=2), 1e-9),
]


@pytest.mark.parametrize(("name", "world", "overrides", "rel"), RESUMED, ids=label)
def test_a_run_is_resumed(ranks, before, tmp_path, world, overrides, rel):
    """In the layout that saved: bit for bit, whether or not training waits for saves. In another:
    it reads the same tokens, so numbers differ only by rounding, and it chooses the same experts,
    so their biases are equal. The checkpoint that it then saves agrees in the same way."""
    config, checkpoints = runs.copy_of(before, tmp_path)
    last = max(checkpoints.glob("step-*")).name
    runs.forget_last(tmp_path)
    runs.run(ranks, world, config, *overrides)
    for numbers in runs.losses, runs.evaluations:
        assert numbers(tmp_path) == pytest.approx(numbers(before), rel=rel, abs=0.0)
    ours = runs.stored_tensors(checkpoints / last)
    theirs = runs.stored_tensors(before / "run" / "checkpoints" / last)
    if rel == 0.0:
        assert runs.same_tensors(ours, theirs)
    assert ours.keys() == theirs.keys()
    for each, tensor in theirs.items():
        rounding = 0.0 if each.endswith("router.bias") else 1e-6 * float(tensor.abs().max())
        assert (ours[each] - tensor).abs().max() <= rounding, each


def train_without(arguments: list[str], what: str) -> str:
    """Plant: the tensors whose names contain `what` are lost in loading."""

    @planted(train, "load")
    def without(load: Callable[..., None], step: TrainStep, start: Start) -> None:
        load(step, start)
        for held in held_tensors(step):
            if what in held.name:
                held.tensor.to_local().zero_()

    with without():
        return runs.train_run(arguments)


@pytest.mark.parametrize(
    ("name", "what", "rel"), [("dense", "optimizer.", 1e-4), ("experts", "router.bias", 1e-9)]
)
def test_what_is_not_loaded_shows_in_the_losses(ranks, before, tmp_path, what, rel):
    """Control of the test above."""
    config, _ = runs.copy_of(before, tmp_path)
    runs.forget_last(tmp_path)
    assert ranks.run(train_without, 1, [config, *layout(ep=1)], what) == [""]
    ours, whole = runs.losses(tmp_path), runs.losses(before)
    assert ours != pytest.approx(whole, rel=rel)


def test_a_run_that_begins_with_a_named_checkpoint_continues_itself(ranks, saved_experts, tmp_path):
    """A job's later starts have the same setting. They must neither be refused nor begin anew, also
    if the folder had a damaged checkpoint of a run before, or has been moved since."""
    first, other = runs.checkpoint_of(saved_experts, 2), tmp_path / "step-00000002"
    shutil.copytree(first, other)
    config = [str(saved_experts / "config.yaml"), *layout(ep=1), f"run.dir={tmp_path / 'run'}"]
    (tmp_path / "run" / "checkpoints" / "step-00000009.damaged").mkdir(parents=True)
    for interval, steps in ("never", 3), ("never", 3), (1, 3), (1, 4):
        more = f"checkpoint.interval={interval}", f"train.steps={steps}"
        runs.run(ranks, 1, *config, f"checkpoint.resume={first}", *more)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    more = "checkpoint.interval=never", "train.steps=5", f"run.dir={moved}"
    runs.run(ranks, 1, *config, f"checkpoint.resume={first}", *more)
    moved.rename(tmp_path / "run")
    events = read_events(tmp_path / "run")
    assert [event["step"] for event in events if event["event"] == "start"] == [2, 2, 2, 3, 4]
    (said,) = ranks.run(runs.train_run, 1, [*config, f"checkpoint.resume={other}"])
    assert "it holds step-00000004, which this run would not start from" in said
    for step in (3, 4):
        flip_a_bit(runs.checkpoint_of(tmp_path, step) / "trainer.json")
    shutil.copytree(first, runs.checkpoint_of(tmp_path, 2))  # of the run before
    (said,) = ranks.run(runs.train_run, 1, [*config, f"checkpoint.resume={first}"])
    assert "is damaged: step-00000003.damaged, step-00000004.damaged" in said


def test_a_run_goes_back_to_the_checkpoint_it_began_with(ranks, saved_experts, tmp_path):
    """Not to an earlier one that a run before has left in its folder."""
    config, _ = runs.copy_of(saved_experts, tmp_path)
    runs.forget_last(tmp_path)
    more = [*layout(ep=1), f"checkpoint.resume={runs.checkpoint_of(saved_experts, 4)}"]
    more += ["train.steps=7", "guard.max_bad_steps=2"]
    assert ranks.run(run_with_bad_steps, 1, [config, *more], 0, {1, 2}) == [""]
    (rollback,) = runs.events_of(tmp_path / "run", "rollback")
    assert rollback["step"] == 4


def run_with_a_lost_source(arguments: list[str], lose: Callable[[Path], None], path: Path) -> str:
    """Train with two bad steps; before the run goes back, its source `path` is lost."""

    @planted(Rollback, "_go_back")
    def lost(go_back: Callable[..., None], *given: object) -> None:
        lose(path)
        go_back(*given)

    with lost():
        return runs.said_by(run_with_bad_steps, arguments, 0, {1, 2})


@pytest.mark.parametrize("lose", [flip_a_bit, Path.unlink])
def test_a_run_does_not_go_back_to_a_source_that_was_lost(ranks, saved_experts, tmp_path, lose):
    """It was verified at the start, but the other run may have deleted it since. What a run before
    has left in this run's folder does not take its place."""
    config, _ = runs.copy_of(saved_experts, tmp_path)
    runs.forget_last(tmp_path)
    source = shutil.copytree(runs.checkpoint_of(saved_experts, 4), tmp_path / "step-00000004")
    file = max(source.glob("*.safetensors" if lose is flip_a_bit else MANIFEST))
    more = [*layout(ep=1), f"checkpoint.resume={source}", "train.steps=7", "guard.max_bad_steps=2"]
    (said,) = ranks.run(run_with_a_lost_source, 1, [config, *more], lose, file)
    assert "there is no checkpoint to go back to" in said
    assert runs.events_of(tmp_path / "run", "rollback") == []


LOADS = [
    ("dense", 4, layout(tp=2)),
    thorough("dense", 4, layout(cp=4)),
    thorough("experts", 8, layout(ep=1)),  # each of 4 experts is cut
    thorough("experts", 8, layout(ep=4, tp=2, pp=2)),
    thorough("experts", 2, [*layout(ep=1, dp_shard=1, dp_replicate=2), "parallel.zero_stage=0"]),
]


@pytest.mark.parametrize(("name", "world", "overrides"), LOADS, ids=label)
def test_every_layout_loads_the_same_tensors(ranks, before, world, overrides):
    """Weights, biases and moments, bit for bit."""
    path = runs.checkpoint_of(before, 4)
    arguments = [str(before / "config.yaml"), *overrides, "train.micro_batch_size=1"]
    expected = runs.stored_tensors(path)
    assert runs.same_tensors(ranks.run(runs.global_state, world, arguments, str(path))[0], expected)
    assert any(t.abs().max() > 0 for n, t in expected.items() if n.endswith("exp_avg_sq"))


@pytest.mark.thorough
def test_other_models_too(ranks, data, tmp_path):
    """Of an uneven split of layers, and head norms shorter than dp_shard."""
    sections = {"model": {"qk_norm": True, "attention_dim": 8}, "train": {"steps": 2}}
    config = runs.write_config(tmp_path, data, checkpoint={"interval": 2}, **sections)
    runs.run(ranks, 8, config, "parallel.tp=2", "parallel.pp=2", "parallel.layers_per_stage=[1, 3]")
    saved = runs.checkpoint_of(tmp_path, 2)
    interleaved = ["parallel.schedule=interleaved_1f1b", "parallel.stages_per_rank=2"]
    for world, overrides in (8, layout(tp=2)), (4, [*layout(pp=2), *interleaved]):
        state = ranks.run(runs.global_state, world, [config, *overrides], str(saved))[0]
        assert runs.same_tensors(state, runs.stored_tensors(saved)), overrides


def test_a_checkpoint_of_an_earlier_version(ranks, data, tmp_path):
    """It loads the numbers whose hashes that version wrote down."""
    verify_checkpoint(runs.FIXTURE)
    config = runs.write_config(tmp_path, data, model=parse_trainer(runs.FIXTURE).model)
    state = ranks.run(runs.global_state, 1, [config], str(runs.FIXTURE))[0]
    found = {n: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for n, t in state.items()}
    assert found == json.loads(runs.FIXTURE.with_suffix(".json").read_text())


def second_copies(arguments: list[str], path: str) -> list[bool]:
    """Load the checkpoint `path`; whether each second copy of a tensor is like the first."""
    step = runs.step_of(arguments)
    load(step, runs.saved_start(Path(path)))
    held = [(each.is_copy, each.name, each.tensor.to_local()) for each in held_tensors(step)]
    first = {name: tensor for is_copy, name, tensor in held if not is_copy}
    return [torch.equal(tensor, first[name]) for is_copy, name, tensor in held if is_copy]


def test_a_tied_weight_is_saved_once_and_loaded_into_both_its_copies(ranks, saved_experts):
    """Of the weight and of its two moments, on a rank that has the first and the last stage."""
    path = runs.checkpoint_of(saved_experts, 4)
    config = str(saved_experts / "config.yaml")
    assert ranks.run(second_copies, 1, [config, *layout(ep=1)], str(path)) == [[True] * 3]
    assert "model.head.weight" not in read_manifest(path).tensors


def load_and_save(arguments: list[str], start: Path | None) -> None:
    """Load a checkpoint, or train one step, and save. Each rank must have loaded its part."""
    step = runs.step_of(arguments)
    rows = 8 // step.mesh.batch.size
    tokens = torch.arange(rows * 32).view(rows, 32) % step.config.model.vocab_size
    if start is None:
        step(0, tokens, tokens)
    else:
        load(step, runs.saved_start(start))
        stored = runs.stored_tensors(start)
        for held in held_tensors(step):
            region = tuple(slice(part.start, part.stop) for part in local_region(held.tensor))
            assert torch.equal(held.tensor.to_local(), stored[held.name][region]), held.name
    with Lease(step.config.run.dir) as lease:
        saver = Saver(step, open_data(step.config.data, "train"), lease, RunLog(step.config))
        saver.save(1, 0, DataState(checksum="none", next_sample=0, skipped=[]))
        saver.close()


def test_a_vocabulary_that_tp_does_not_divide(ranks, data, tmp_path):
    """On tp 2 and dp_shard 4, the ranks hold 2, 2, 1, 0 and 1, 1, 1, 1 of its rows. The empty part
    has the offset of the next one, and torch's rule gives that rank a row and the last one none."""
    model = {"num_layers": 1, "vocab_size": 9}
    config, start = runs.write_config(tmp_path, data, model=model), None
    for world, tp in (1, 1), (8, 2), (4, 2), (8, 2), (1, 1):
        folder = tmp_path / f"from {start and start.parents[2].name} to {world}"
        arguments = [config, *layout(tp=tp), f"run.dir={folder / 'run'}"]
        ranks.run(load_and_save, world, arguments, start)
        saved = runs.checkpoint_of(folder, 1)
        verify_checkpoint(saved)
        if start is not None:
            assert runs.same_tensors(runs.stored_tensors(saved), runs.stored_tensors(start))
        start = saved


def test_ranks_with_copies_share_their_writing(ranks, data, tmp_path):
    """Weights have copies over dp_replicate, and norms over tp, too."""
    config = runs.write_config(tmp_path, data, model={"num_layers": 2})
    arguments = [config, *layout(tp=2, dp_replicate=2, dp_shard=1)]
    ranks.run(load_and_save, 4, arguments, None)
    files = runs.checkpoint_of(tmp_path, 1).glob("shard-*")
    written = [path.stat().st_size for path in sorted(files)]
    assert len(written) == 4
    assert max(written) < 1.1 * min(written)
