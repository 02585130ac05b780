"""Models with layers of several kinds agree with the reference in every layout."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from errors import UserError
from kinds import kinds_in
from parallel.axes import MeshSizes
from proofs.parity.cases import Case
from proofs.parity.chosen import WINDOW, kind_cases
from runtime.checkpoint.load import _start_from
from settings.load import load_config
from settings.sections import OptimizerConfig
from tests.proofs.parity_tiers import agrees, thorough_but
from tests.runs import checkpoint_of, trainer_of


def test_every_kind_is_compared() -> None:
    """`make parity` has cases of every kind; of a new one only once it has a reference."""
    elsewhere = {"attention": set(), "feed_forward": {"experts", "swiglu"}}  # in other cases
    for key, kinds in elsewhere.items():
        tried = {getattr(case, key) for case in kind_cases()} - {getattr(Case, key)}
        assert kinds.union(*tried) == set(kinds_in(f"model.{key}")), key
    with (
        patch("proofs.parity.chosen.kinds_in", lambda package: ["relu"]),
        pytest.raises(UserError, match=r"write proofs/parity/reference_relu\.py, with a class Att"),
    ):
        kind_cases()
    with (  # nor can a router be left out because no case of it is valid
        patch("proofs.parity.cases.keys_to_try", lambda key, kind: WINDOW["keys"]),
        pytest.raises(UserError, match="nothing is of kind sliding_window"),
    ):
        kind_cases()


IN_EVERY_SECOND_LAYER = Case(MeshSizes(tp=2), feed_forward=("swiglu", "experts"), router="softmax")
KINDS = [*kind_cases(), IN_EVERY_SECOND_LAYER]


@pytest.mark.parametrize("case", thorough_but([*KINDS[1:3], KINDS[-1]], KINDS), ids=str)
def test_kinds_agree(ranks, case):
    agrees(ranks, case)


def test_layers_take_kinds_in_turn() -> None:
    """As Gemma's do."""
    model = Case(MeshSizes(pp=2), **WINDOW).config().model
    assert [model.attention_of(layer) for layer in range(4)] == ["sliding_window", "causal"] * 2


def test_a_checkpoint_of_another_optimizer_is_refused(saved: Path) -> None:
    checkpoint = checkpoint_of(saved, 2)
    assert trainer_of(saved, 2)["optimizer"] == "adamw"
    config = load_config(str(saved / "config.yaml"), [])
    with patch.object(OptimizerConfig, "select"):
        other = replace(config.optimizer, name="lion")
    with pytest.raises(UserError, match=r"has optimizer\.name='adamw'"):
        _start_from(checkpoint, replace(config, optimizer=other), None, None)
