"""Every exercise in docs/exercises can be solved, and its tests fail until it is solved.

They run in this process, so that what a reader completes can be replaced by the answers."""

import importlib
import inspect
from typing import Any

import pytest
import torch.distributed as dist

import proofs.ranks
from tests import ROOT
from tests.docs import exercise_answers

FOLDER = ROOT / "docs" / "exercises"
FILES = sorted(file.stem for file in FOLDER.glob("test_*.py"))
UNSOLVED = {
    (module, name)
    for module in (importlib.import_module(f"docs.exercises.{file}") for file in FILES)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if 'NotImplementedError("yours to write")' in inspect.getsource(function)
}


class Run(dict[str, str]):
    """A run of exercises, completed by `answers`: what each test said when it failed; nothing: it
    passed. once: each test with one set of its arguments."""

    def __init__(self, answers: dict[str, Any], *files: str, once: bool = False) -> None:
        super().__init__()
        self.once = once
        with pytest.MonkeyPatch.context() as patches:
            patches.chdir(ROOT)
            patches.setattr(proofs.ranks, "GRACE_SECONDS", 0.1)
            for module, name in UNSOLVED:
                patches.setattr(module, name, answers.get(name, getattr(module, name)))
            paths = [str(FOLDER / f"{file}.py") for file in files or FILES]
            pytest.main([*paths, "-q", "-p", "no:cacheprovider"], plugins=[self])
        assert {name.partition(".")[0] for name in self} == {*(files or FILES)}

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        if self.once:
            items[:] = {item.function: item for item in reversed(items)}.values()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self[report.nodeid.rpartition("/")[2]] = report.longreprtext


def test_exercises_fail_until_they_are_done() -> None:
    found = Run({}, once=True)
    assert [name for name, said in found.items() if "yours to write" not in said] == []


def test_exercises_can_be_done() -> None:
    assert {name: said for name, said in Run(vars(exercise_answers)).items() if said} == {}


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


def test_wrong_answers_are_not_accepted() -> None:
    """Control: three answers that lack the communication, and one with the ranks' parts in the
    wrong order."""
    found = Run(vars(exercise_answers) | dict(WRONG.values()), *WRONG)
    failed = {name.partition(".")[0] for name, said in found.items() if "AssertionError" in said}
    assert failed == WRONG.keys()
