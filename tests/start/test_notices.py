"""What a start says about its configuration."""

import re
from pathlib import Path

import pytest

from proofs.ranks import Ranks
from runtime.start.announce import changed_settings, notices
from settings.load import dump_config, load_config
from tests.runs import heard, write_config

CONFIG = "configs/laptop.yaml"


def test_what_changed_is_named(tmp_path: Path) -> None:
    """Settings of the training and the layout; not those of the run folder."""
    (tmp_path / "config.yaml").write_text(dump_config(load_config(CONFIG, [])))
    other = load_config(CONFIG, ["train.steps=200", "parallel.tp=1", "run.log_interval=3"])
    assert changed_settings(tmp_path, load_config(CONFIG, [])) == []
    assert changed_settings(tmp_path, other) == ["parallel.tp 2 → 1", "train.steps 160 → 200"]
    for path, why in (
        (tmp_path / "run" / "checkpoints" / "step-00000001", "'/.*/run/config.yaml': No such file"),
        (tmp_path / "step-00000001", "no config.yaml belongs to it"),
    ):
        (line,) = notices(other, path, "cpu", 4096)
        assert re.match(rf"what changed since .*{tmp_path}/.* is not known: .*{why}", line)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], ""),
        (["checkpoint.interval=never"], "warning: checkpoint.interval is never"),
        (["model.experts.router_aux_weight=0", "model.sigmoid_bias.bias_rate=0"],
         "warning: nothing keeps the load of experts even"),
        (["model.vocab_size=4128"], "model.vocab_size is 4,128, and the data's tokenizer has "
         "4,096 tokens: the other 32 are never targets"),
        (["optimizer.lr=0"], "warning: optimizer.lr is 0"),
        (["optimizer.warmup_steps=160"],
         "warning: optimizer.warmup_steps=160 is not less than the 160 steps"),
        (["optimizer.weight_decay=1000"],
         "warning: optimizer.lr · optimizer.weight_decay is 3: above 1"),
        (["optimizer.adamw.betas=[0.95, 0.9]"],
         "warning: optimizer.adamw.betas=[0.95, 0.9]: the first is larger"),
        (["guard.spike_sigmas=1"],
         "warning: guard.spike_sigmas=1 skips about 15.9% of the updates"),
        (["checkpoint.interval=40", "checkpoint.keep_every=60"],
         "warning: checkpoint.keep_every=60 is no multiple"),
        (["model.experts.per_token=8"], "warning: model.experts.per_token=8 is all experts"),
        (["data_stages=[{from_step: 150, optimizer: {warmup_steps: 20}}, {from_step: 155}]"],
         "warning: data_stages.1.optimizer.warmup_steps=20 is not less than the 10 steps"),
    ],
)  # fmt: skip
def test_what_may_be_a_mistake_is_named(settings: list[str], said: str) -> None:
    lines = notices(load_config("configs/laptop_moe.yaml", settings), None, "cpu", 4096)
    assert len(lines) == bool(said)
    assert "".join(lines).startswith(said)


def test_a_resumed_run_names_what_changed(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, train={"steps": 2}, checkpoint={"interval": 1})

    def said(*overrides: str) -> str:
        """What the log of a run with these overrides says has changed, if anything."""
        ((refusal, log),) = ranks.run(heard, 1, [config, *overrides], "stdout")
        assert refusal == ""
        return "\n".join(line for line in log.splitlines() if line.startswith("changed since"))

    assert said() == ""
    assert said("train.steps=3", "optimizer.lr=0.002") == (
        "changed since the previous start: train.steps 2 → 3, optimizer.lr 0.003 → 0.002"
    )
    # another run's checkpoint, of which only the weights are read: what was asked of that run
    other = [f"run.dir={tmp_path / 'other'}", f"checkpoint.load_weights_only={tmp_path / 'run'}"]
    assert said("train.global_batch_size=4", *other) == (
        f"changed since the last start of {tmp_path / 'run'}: train.steps 3 → 2, "
        "train.global_batch_size 8 → 4, optimizer.lr 0.002 → 0.003"
    )
