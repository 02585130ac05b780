"""The list `data_stages` of a configuration: what each stage has, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from errors import UserError
from settings.checks import validate
from settings.config import Config
from settings.data_stages import data_stage_of, data_stages, tokens_after
from settings.load import dump_config, load_config, load_saved
from tests import ROOT
from tools.plan.memory import one_stage
from training.learning_rate import learning_rate

LAPTOP = str(ROOT / "configs/laptop.yaml")  # 64 × 128 tokens, 160 steps
LONGER = "{from_step: 50, train: {seq_len: 256, global_batch_size: 32, micro_batch_size: 8}}"
ANNEAL = (
    "{from_token: 1_000_000, optimizer: {schedule: linear, lr: 1e-3}, "
    "parallel: {cp: 2, dp_shard: 1}}"
)


def load(*stages: str, also: tuple[str, ...] = ()) -> Config:
    return load_config(LAPTOP, [f"data_stages=[{', '.join(stages)}]", *also])


def test_settings_hold_until_a_stage_changes_them() -> None:
    config = load(LONGER, ANNEAL)
    validate(config, 8)
    stages = data_stages(config)
    first, longer, anneal = (one.config for one in stages)
    assert first == replace(config, data_stages=()) == load_config(LAPTOP, [])
    assert [one.train.seq_len for one in (first, longer, anneal)] == [128, 256, 256]
    assert [one.parallel.cp for one in (first, longer, anneal)] == [1, 1, 2]
    assert [one.parallel.tp for one in (first, longer, anneal)] == [2, 2, 2]
    # a million tokens are reached in step 123, of 8,192 tokens each
    assert [one.steps for one in stages] == [range(50), range(50, 123), range(123, 160)]
    assert [one.phase for one in stages] == [range(123), range(123), range(123, 160)]
    numbers = [data_stage_of(stages, step).number for step in (0, 49, 50, 122, 123, 159, 160)]
    assert numbers == [0, 0, 1, 1, 2, 2, 2]
    assert [tokens_after(stages, step) for step in (1, 50, 51)] == [8192, 50 * 8192, 51 * 8192]
    assert (longer.optimizer.warmup_steps, anneal.optimizer.warmup_steps) == (20, 0)


def test_it_is_written_as_it_was_read(tmp_path: Path) -> None:
    config, file = load(LONGER, ANNEAL), tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(str(file), []) == config
    # the folder of a run of an older version, whose key was `stages`; a start refuses that
    file.write_text(dump_config(config).replace("data_stages:", "stages:"))
    assert load_saved(tmp_path) == config
    for path, overrides in ((str(file), []), (LAPTOP, ["stages=[]"]), (LAPTOP, ["stages.1.x=9"])):
        with pytest.raises(UserError, match=r"^stages = ") as error:
            load_config(path, overrides)
        assert error.value.remedy == "did you mean data_stages?"


def test_overrides() -> None:
    typed = ("train.seq_len=64", "from_step=9", "data.path=a #b", "train.eval_interval=020")
    config = load(LONGER, also=tuple(f"data_stages.1.{override}" for override in typed))
    first, second = data_stages(config)
    assert (second.config.train.seq_len, first.steps) == (64, range(9))
    assert (second.config.data.path, second.config.train.eval_interval) == ("a #b", 20)
    for override in ("data_stages.1.from_step.x=5", "data_stages.1=5"):
        with pytest.raises(UserError, match=r"^data_stages\."):
            load(LONGER, also=(override,))
    config = load(LONGER, also=("train.seq_len=64", "train.eval_interval=7"))
    first, second = (stage.config.train for stage in data_stages(config))
    assert (first.seq_len, second.seq_len) == (64, 256), "until a data stage sets it"
    assert second.eval_interval == 7
    assert load(LONGER, also=("data_stages=[]",)) == load_config(LAPTOP, [])


REFUSED = [
    ("3", "1 = 3: does not say where it begins"),
    ("{from_step: 5, from_token: 5}", "1 = {'from_step': 5, 'from_token': 5}: does not say"),
    ("{from_step: 0}", "1.from_step = 0: "),
    ("{from_step: 160}", "1.from_step = 160: it would begin after step 160"),
    ("{from_step: 5}, {from_token: 7}", "2.from_token = 7: it would begin after step 1"),
    ("{from_step: 5, run: {dir: x}}", "1.run = {'dir': 'x'}: a data stage cannot change it"),
    ("{from_step: 5, model: {dim: 5}}", "1.model.dim = 5: a data stage cannot change it"),
    ("{from_step: 5, optimizer: {name: x}}", "1.optimizer.name = 'x': a data stage cannot"),
    ("{from_step: 5, train: 7}", "1.train = 7: is not a section with keys"),
    ("{from_step: 5, parallel: {ttp: 5}}", "1.parallel.ttp = 5: there is no such key"),
    ("{from_step: 5, parallel: {tp: 3}}", "1.parallel.tp = 3: "),
    ("{from_step: 5, train: {global_batch_size: 7}}", "1.train.global_batch_size = 7: must"),
    ("{from_step: 60, optimizer: {schedule: wsd, warmup_steps: 60, decay_steps: 50}}",
     "1.optimizer.decay_steps = 50: with optimizer.warmup_steps=60 they would be more than "
     "its phase of 100 steps"),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "message"), REFUSED)
def test_what_is_refused(stages: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        validate(load(stages), 8)
    assert str(error.value).startswith(f"data_stages.{message}")


def test_a_stage_without_evaluation() -> None:
    """A run with tasks evaluates in some data stage, not in all; each may be planned by itself."""
    with_tasks = ("train.tasks=[python]", "train.eval_interval=5")
    config = load("{from_step: 5, train: {eval_interval: 0}}", also=with_tasks)
    validate(config, 8)
    validate(one_stage(config, 8, 1)[0], 8)
    with pytest.raises(UserError, match="the run never evaluates"):
        validate(load("{from_step: 5}", also=(*with_tasks, "train.eval_interval=0")), 8)


def test_a_stage_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="the file has 1 data stages"):
        load(LONGER, also=("data_stages.2.train.seq_len=64",))
    with pytest.raises(UserError, match="is not a list"):
        load_config(LAPTOP, ["data_stages=3"])
    with pytest.raises(UserError, match="101 data stages: too many"):
        load_config(LAPTOP, [f"data_stages={[{'from_step': step} for step in range(1, 102)]}"])


def test_rates_of_phases() -> None:
    """Warm-up and stable, then decay, then anneal: each phase counts its own steps."""
    config = load(
        "{from_step: 60, optimizer: {schedule: cosine, min_lr_ratio: 0.1}}",
        "{from_step: 80, train: {micro_batch_size: 8}}",
        "{from_step: 120, optimizer: {schedule: linear, lr: 1e-4, min_lr_ratio: 0}}",
        also=("optimizer.schedule=stable", "optimizer.lr=1e-3", "optimizer.warmup_steps=10"),
    )

    def rate(step: int) -> float:
        one = data_stage_of(data_stages(config), step)
        return learning_rate(step, one.phase, one.config.optimizer)

    assert [rate(0), rate(9), rate(10), rate(59), rate(60)] == [1e-4, 1e-3, 1e-3, 1e-3, 1e-3]
    assert rate(90) == pytest.approx(1e-3 * 0.55), "half-way of the 60 steps of two stages"
    assert rate(119) > 1e-4
    assert [rate(120), rate(140)] == pytest.approx([1e-4, 5e-5])
    assert rate(159) == pytest.approx(1e-4 / 40)


def test_the_stage_to_plan() -> None:
    config = load(LONGER, also=("train.dtype=bfloat16",))
    longest = "{from_step: 50, train: {seq_len: 1024}}"
    most, said = one_stage(load(longest), 8, None)
    assert most.train.seq_len == 1024
    assert said.startswith("data stage 1 of 0 to 1, whose peaks are ")
    assert not most.data_stages
    chosen, said = one_stage(config, 8, 0)
    assert (chosen.train.seq_len, said) == (128, "data stage 0 of 0 to 1")
    with pytest.raises(UserError, match="the data stages 0 to 1"):
        one_stage(config, 8, 2)
    assert one_stage(load_config(LAPTOP, []), 8, None)[1] == ""
