"""Every exercise in docs/exercises can be solved, and its tests fail until it is solved."""

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from proofs.ranks import RankError, Ranks
from tests import ROOT
from tests.docs import exercise_answers

NAMES = sorted(file.stem for file in (ROOT / "docs" / "exercises").glob("test_*.py"))


def functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        name: f
        for name, f in inspect.getmembers(module, inspect.isfunction)
        if f.__module__ == module.__name__
    }


def complete(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the answers in the place of what a reader completes."""
    unsolved = [
        name
        for name, f in functions(module).items()
        if 'NotImplementedError("yours to write")' in inspect.getsource(f)
    ]
    assert unsolved
    for name in unsolved:
        monkeypatch.setattr(module, name, getattr(exercise_answers, name))


def calls(module: ModuleType, ranks: Ranks) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each test of a module with each set of its arguments, as pytest would call it."""
    for name, test in functions(module).items():
        if not name.startswith("test_"):
            continue
        choices = []
        for mark in getattr(test, "pytestmark", []):
            keys, values = mark.args
            if isinstance(keys, str):
                keys, values = (keys,), [(value,) for value in values]
            choices.append([dict(zip(keys, value, strict=True)) for value in values])
        for chosen in itertools.product(*choices):
            given = {key: value for some in chosen for key, value in some.items()}
            if "ranks" in inspect.signature(test).parameters:
                given["ranks"] = ranks
            yield name, lambda test=test, given=given: test(**given)


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_fails_until_it_is_done_and_can_be_done(
    name: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(f"docs.exercises.{name}")
    seen = set()
    for test, call in calls(module, ranks):
        if test not in seen:  # one set of arguments per test is enough
            seen.add(test)
            with pytest.raises((NotImplementedError, RankError), match="yours to write"):
                call()
    complete(module, monkeypatch)
    for _, call in calls(module, ranks):
        call()


def without_all_reduce(dy: Any, x: Any, weight: Any, group: Any, sequence_parallel: bool) -> Any:
    return (dy @ weight)[: len(x)], dy.T @ exercise_answers.gathered(x, group, sequence_parallel)


def without_the_other_rows(dy: Any, normed: Any, group: Any, sequence_parallel: bool) -> Any:
    return (dy * normed).sum(0)


def without_the_zigzag(dk: Any, group: Any) -> Any:
    mine = dk.new_empty(len(dk) // group.size(), *dk.shape[1:])
    dist.reduce_scatter_tensor(mine, dk.contiguous(), group=group)
    return mine


def without_the_other_tokens(bias: Any, chosen: Any, rate: float, group: Any) -> Any:
    counts = chosen.flatten().bincount(minlength=len(bias))
    return bias + rate * (counts.sum() - counts * len(bias)).sign()


WRONG = {
    "test_tensor": ("column_parallel_backward", without_all_reduce),
    "test_sequence": ("norm_weight_gradient", without_the_other_rows),
    "test_context": ("gradient_of_my_keys", without_the_zigzag),
    "test_experts": ("new_bias", without_the_other_tokens),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_not_accepted(
    name: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: three answers that lack the communication, and one with the ranks' parts in the
    wrong order."""
    module = importlib.import_module(f"docs.exercises.{name}")
    complete(module, monkeypatch)
    monkeypatch.setattr(module, *WRONG[name])
    with pytest.raises(AssertionError):
        _ = [call() for _, call in calls(module, ranks)]
