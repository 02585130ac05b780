"""Models with layers of several kinds agree with the reference in every layout."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from errors import UserError
from kinds import kinds_in
from model.mask import Mask, make_mask, scores_bias
from model.transformer import Transformer, kinds_of_blocks, num_parameters
from parallel.axes import MeshSizes
from parallel.layer import TensorParallel
from parallel.parameter import weights_of
from proofs.parity.cases import Case
from proofs.parity.reference import ATTENTION, FEED_FORWARD
from proofs.parity.run import check
from runtime.checkpoint.load import _start_from
from settings.load import load_config
from tests.proofs.parity_tiers import agrees
from tests.runs import checkpoint_of

# Every second layer has a window of 5 tokens, in sequences of 16; Gemma alternates like this.
WINDOWS = {"attention": ("sliding_window", "causal"), "attention_window": 5}


def test_every_kind_has_its_reference() -> None:
    assert sorted(ATTENTION) == kinds_in("model.attention")
    assert sorted([*FEED_FORWARD, "experts"]) == kinds_in("model.feed_forward")


@pytest.mark.parametrize(
    "case",
    [
        Case(MeshSizes(), **WINDOWS),
        # Stages of two layers and of one: kinds alternate by layer, not within a stage.
        Case(MeshSizes(pp=2, tp=2), schedule="zb_h1", layers="uneven", num_kv_heads=1, **WINDOWS),
        Case(MeshSizes(dp_shard=2), zero_stage=3, document_mask=True,
             activation_checkpointing="full", **WINDOWS),
    ],
    ids=str,
)  # fmt: skip
def test_a_window_in_every_second_layer(ranks, case):
    agrees(ranks, case, steps=3)


def window_forgotten():
    # Plant: every layer attends to all earlier tokens.
    return patch(
        "model.positions.make_mask", lambda p, d, window, *rest: make_mask(p, d, None, *rest)
    )


def test_a_forgotten_window_is_found(ranks):
    row = check(ranks, Case(MeshSizes(tp=2), **WINDOWS), sabotage=window_forgotten)
    assert {"loss", "gradient", "norm"} <= set(row.failures()), row.crash


def test_the_bias_of_a_window() -> None:
    """The additive mask of a window is right for each query, also where documents begin inside the
    window."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]]).T
    bias = scores_bias(positions, torch.float64, window=2)
    for row, starts in enumerate([[0, 4], [0, 2]]):
        for query in range(6):
            first = max(start for start in starts if start <= query)
            sees = [key for key in range(6) if max(first, query - 1) <= key <= query]
            assert (bias[row, 0, query] == 0).nonzero().flatten().tolist() == sees
    assert make_mask(torch.arange(6).unsqueeze(1), None, 6, torch.float32, 8) == Mask()


def test_layers_take_kinds_in_turn() -> None:
    config = Case(MeshSizes(pp=2), **WINDOWS).config().model
    whole = Transformer(config, range(4), True, True, TensorParallel())
    assert [whole.blocks[str(i)].attention.window for i in range(4)] == [5, None, 5, None]
    assert {n for _, n in kinds_of_blocks(config)} == {2}
    assert num_parameters(config) == sum(each.numel for each in weights_of(whole))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"attention": "slidin_window"}, "model.attention"),
        ({"attention": ("causal", "none")}, "model.attention"),
        ({"feed_forward": "relu"}, "model.feed_forward"),
        ({"attention": "sliding_window"}, "model.attention_window"),
        ({"attention": ("causal", "sliding_window")}, "model.attention_window"),
    ],
)
def test_what_there_is_not_is_refused(options, key) -> None:
    with pytest.raises(UserError) as refused:
        Case(MeshSizes(pp=2), **options).config()
    assert refused.value.key == key


def test_a_file_that_begins_with_an_underscore_is_no_kind(tmp_path: Path) -> None:
    (tmp_path / "layers").mkdir()
    for name in ("__init__", "_helpers", "b", "a"):
        (tmp_path / "layers" / f"{name}.py").touch()
    with patch("kinds.ROOT", tmp_path):
        assert kinds_in("layers") == ["a", "b"]


def test_a_checkpoint_of_another_optimizer_is_refused(saved: Path) -> None:
    checkpoint = checkpoint_of(saved, 2)
    assert json.loads((checkpoint / "trainer.json").read_text())["optimizer"] == "adamw"
    config = load_config(str(saved / "config.yaml"), [])
    with patch("settings.sections.OPTIMIZERS", ["adamw", "lion"]):
        other = replace(config.optimizer, name="lion")
    with pytest.raises(UserError, match=r"has optimizer\.name='adamw'"):
        _start_from(checkpoint, None, replace(config, optimizer=other), None, None)
