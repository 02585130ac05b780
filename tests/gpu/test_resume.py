"""A run on the GPU that is saved and resumed ends with the same bits.

With train.deterministic, the losses of the last three steps and every byte of the tensors of the
last checkpoint must be equal. Without it, losses may differ a little: flash attention adds up
gradients in any order.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.data_samples import prepared
from tests.gpu.bench import train
from tests.runs import checkpoint_of, same_tensors, stored_tensors

HALF, WHOLE = 3, 6  # steps
DIVERGENCE = 2**-8  # relative, of a loss, where bits may differ


def stored_bytes(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The bytes of each tensor, which also differ where numbers do not: of 0 and -0."""
    stored = stored_tensors(checkpoint)
    return {name: tensor.flatten().view(torch.uint8) for name, tensor in stored.items()}


def resume(folder: Path, deterministic: bool, optimizer: dict[str, Any]) -> dict[str, Any]:
    """How far the second run's losses are from the first's, and whether both saved the same."""
    data = prepared(folder / "data")
    steps = {"dtype": "bfloat16", "steps": WHOLE, "deterministic": deterministic}
    steps["eval_interval"] = 0 if deterministic else HALF  # one of the two kinds evaluates too
    settings = {"optimizer": optimizer, "train": steps}
    whole, resumed = folder / "whole", folder / "resumed"
    expected = train(whole, data, **settings, checkpoint={"interval": HALF, "keep_last": 3})
    again = {"interval": HALF, "resume": str(checkpoint_of(whole, HALF))}
    found = train(resumed, data, **settings, checkpoint=again)
    off = max(abs(found[step] / expected[step] - 1) for step in range(HALF + 1, WHOLE + 1))
    saved = [stored_bytes(checkpoint_of(run, WHOLE)) for run in (whole, resumed)]
    same = same_tensors(*saved) and bool(saved[0])
    return {"loss_off": off, "same_bytes": same, "steps": sorted(found)}


def assert_same(found: dict[str, Any], deterministic: bool) -> None:
    assert found["steps"] == list(range(HALF + 1, WHOLE + 1))
    off = found["loss_off"]
    assert off <= (0 if deterministic else DIVERGENCE), f"losses are {off:.1e} off"
    assert found["same_bytes"] or not deterministic, "other bytes"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("deterministic", "optimizer"),
    [
        pytest.param(True, {}, id="deterministic"),
        pytest.param(True, {"pure_bfloat16": True}, id="deterministic, pure_bfloat16"),
        pytest.param(False, {}, id="not deterministic"),
    ],
)
def test_a_run_resumes_with_the_same_bits(
    tmp_path: Path, deterministic: bool, optimizer: dict[str, Any], record: Any
) -> None:
    found = resume(tmp_path, deterministic, optimizer)
    record(found)
    assert_same(found, deterministic)


@pytest.mark.parametrize(
    ("off", "same", "wrong"),
    [(1e-7, True, "losses are 1.0e-07 off"), (0.0, False, "other bytes")],
)
def test_a_resumed_run_with_other_bits_is_found(
    tmp_path: Path, off: float, same: bool, wrong: str
) -> None:
    def planted(folder: Path, data: Path, **sections: Any) -> dict[int, float]:
        again = "resume" in sections["checkpoint"]
        return dict.fromkeys(range(4 if again else 1, 7), 2.0 * (1 + off * again))

    def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
        return {"a": torch.tensor(0.0 if same or "resumed" in checkpoint.parts else -0.0)}

    with (
        patch.multiple(
            __name__, prepared=lambda folder: folder, train=planted, stored_tensors=stored
        ),
        pytest.raises(AssertionError, match=wrong),
    ):
        assert_same(resume(tmp_path, True, {}), deterministic=True)
