"""What a start says about its configuration."""

from contextlib import redirect_stdout
from pathlib import Path

from runtime.start.notices import changed_settings, notices
from tests.runs import train_run, write_config
from tools.ranks import Ranks
from training.load_config import dump_config, load_config

CONFIG = "configs/laptop.yaml"


def test_what_changed_is_named(tmp_path: Path) -> None:
    """Settings of the training and the layout; not those of the run folder."""
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(load_config(CONFIG, [])))
    other = load_config(CONFIG, ["train.steps=200", "parallel.tp=1", "run.log_interval=3"])
    assert changed_settings(file, load_config(CONFIG, [])) == []
    assert changed_settings(file, other) == ["parallel.tp 2 → 1", "train.steps 160 → 200"]
    assert changed_settings(tmp_path / "none.yaml", other) == []


def test_a_run_that_does_not_save_says_so() -> None:
    assert notices(load_config(CONFIG, []), resumes=False, device="cpu") == []
    config = load_config(CONFIG, ["checkpoint.interval=never"])
    (line,) = notices(config, resumes=False, device="cpu")
    assert line.startswith("warning: checkpoint.interval is never")


def test_experts_that_nothing_balances_are_named() -> None:
    moe = "configs/laptop_moe.yaml"
    assert notices(load_config(moe, []), resumes=False, device="cpu") == []
    off = ["model.router_aux_weight=0", "model.router_bias_rate=0"]
    (line,) = notices(load_config(moe, off), resumes=False, device="cpu")
    assert line.startswith("warning: nothing keeps the load of experts even")


def lines_of(arguments: list[str], out: str) -> None:
    """A training run whose log goes to the file `out`."""
    with open(out, "w", encoding="utf-8") as file, redirect_stdout(file):
        assert train_run(arguments) == ""


def test_a_resumed_run_names_what_changed(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, train={"steps": 2}, checkpoint={"interval": 1})
    out = tmp_path / "out.txt"
    ranks.run(lines_of, 1, [config], str(out))
    assert "changed since" not in out.read_text()
    ranks.run(lines_of, 1, [config, "train.steps=3", "optimizer.lr=0.002"], str(out))
    said = "changed since the previous start: train.steps 2 → 3, optimizer.lr 0.003 → 0.002"
    assert said in out.read_text()
