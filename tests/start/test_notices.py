"""What a start says about its configuration."""

import re

import pytest

from runtime.start.announce import notices
from settings.load import dump_config, load_config
from tests.runs import heard, run, write_config

CONFIG = "configs/laptop.yaml"


def test_what_changed_is_named(tmp_path):
    """Settings of the training and the layout; not those of the run folder."""
    path = tmp_path / "checkpoints" / "step-00000001"
    other = load_config(CONFIG, ["train.steps=200", "parallel.tp=1", "run.log_interval=3"])
    (line,) = notices(other, path)
    why = "'/.*/config.yaml': No such file"
    assert re.match(rf"what changed since {path} was saved is not known: .*{why}", line)
    (tmp_path / "config.yaml").write_text(dump_config(load_config(CONFIG, [])))
    changed = "parallel.tp 2 → 1, train.steps 160 → 200"
    assert notices(other, path) == [f"changed since the last start of {tmp_path}: {changed}"]


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        (["train.micro_batch_size=4"], ""),  # the data stage's own counts
        (["data_stages.1.train.micro_batch_size=4"],
         ": train.micro_batch_size 8 → 4, data_stages"),
        (["data_stages.1.optimizer.lr=1e-2"], ": optimizer.lr 0.001 → 0.01, data_stages, so the "
         "learning rate of step 121 0.001 → 0.01"),
        (["data_stages=[{from_step: 100, optimizer: {lr: 1e-3, schedule: stable}, train: "
          "{micro_batch_size: 8}}, {from_step: 140, optimizer: {lr: 1e-4}}]"], ": data_stages"),
        (["train.steps=200"], ": train.steps 160 → 200"),
        (["train.steps=120", "data_stages.1.optimizer.lr=1e-2"],  # no step is left
         ": train.steps 160 → 120, optimizer.lr 0.001 → 0.01, data_stages"),
    ],
)  # fmt: skip
def test_what_changed_in_the_data_stage_that_runs(tmp_path, settings, changed):
    one = ["data_stages=[{from_step: 100, optimizer: {lr: 1e-3, schedule: stable}, train: "
           "{micro_batch_size: 8}}]"]  # fmt: skip
    (tmp_path / "config.yaml").write_text(dump_config(load_config(CONFIG, one)))
    path = tmp_path / "checkpoints" / "step-00000120"
    lines = notices(load_config(CONFIG, one + settings), path, 120)
    assert lines == [f"changed since the last start of {tmp_path}{changed}"] * bool(changed)


def test_a_data_stage_ahead_that_ends_the_phase_of_today_changes_the_rate(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_config(load_config(CONFIG, [])))
    ahead = load_config(CONFIG, ["data_stages=[{from_step: 130, optimizer: {lr: 1e-3}}]"])
    (line,) = notices(ahead, tmp_path / "checkpoints" / "step-00000120", 120)
    assert line.endswith(": data_stages, so the learning rate of step 121 0.000808 → 0.000355")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], ""),
        (["model.experts.router_aux_weight=0", "model.sigmoid_bias.bias_rate=0"],
         "warning: nothing keeps the load of experts even"),
        (["optimizer.lr=0"], "warning: optimizer.lr is 0"),
        (["optimizer.warmup_steps=160"],
         "warning: optimizer.warmup_steps=160 is not less than the 160 steps"),
        (["optimizer.adamw.betas=[0.95, 0.9]"],
         "warning: optimizer.adamw.betas=[0.95, 0.9]: the first is larger"),
        (["model.experts.per_token=8"], "warning: model.experts.per_token=8 is all experts"),
        (["data_stages=[{from_step: 150, optimizer: {warmup_steps: 20}}, {from_step: 155}]"],
         "warning: data_stages.1.optimizer.warmup_steps=20 is not less than the 10 steps"),
    ],
)  # fmt: skip
def test_what_may_be_a_mistake_is_named(settings, said):
    lines = notices(load_config("configs/laptop_moe.yaml", settings), None)
    assert len(lines) == bool(said)
    assert "".join(lines).startswith(said)


def test_a_resumed_run_names_what_changed(ranks, data, tmp_path):
    config = write_config(tmp_path, data, train={"steps": 2}, checkpoint={"interval": 1})
    run(ranks, 1, config)
    changes = ["train.steps=3", "optimizer.lr=0.002"]
    ((refusal, log),) = ranks.run(heard, 1, [config, *changes], "stdout")
    assert refusal == ""
    changed = "train.steps 2 → 3, optimizer.lr 0.003 → 0.002, "
    changed += "so the learning rate of step 3 0.003 → 0.002"
    said = f"changed since the last start of {tmp_path / 'run'}: {changed}"
    assert re.findall("changed since.*", log) == [said]
