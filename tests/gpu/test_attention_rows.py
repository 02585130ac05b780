"""The rows that compare kernels of attention: each runs the kernel of its name, says which one that
was, and does not affect the next."""

from dataclasses import replace
from functools import partial
from typing import get_args, get_type_hints
from unittest.mock import patch

import pytest
from torch import Tensor

from benchmarks.gpu import model, questions
from benchmarks.gpu.programs import ATTENTION_KERNELS, AUTO, WIDE, attention_kernels
from costs.as_on_gpu import AsOnGpu
from errors import UserError
from model import mask
from model.config import ModelConfig
from model.kernels import attention_choice
from model.kernels.attention import CUDNN, FLASH2, FLASH3, Kernel, by_torch
from model.kernels.attention_choice import BY_REQUEST, PLANNED, choose
from model.kernels.backend import why_not_triton
from tests.counting import Operators
from tests.planted import planted

pytestmark = pytest.mark.skipif(why_not_triton("cpu") is not None, reason="needs Triton")


@pytest.fixture
def ran(monkeypatch):
    """Pretends that every kernel that may be demanded runs on a CPU. Returns the list of the names
    of those that ran."""
    names: list[str] = []

    def noted(name: str, *arguments: Tensor) -> Tensor:
        names.append(name)
        return by_torch(*arguments)

    pretended = {name: Kernel(f"{name} here", partial(noted, name), ()) for name in BY_REQUEST}

    @planted(attention_choice, "_impossible")
    def all_possible(impossible, kernel, *rest):
        return () if kernel in pretended.values() else impossible(kernel, *rest)

    choose.cache_clear()
    with all_possible(), patch.dict(BY_REQUEST, pretended):
        yield names
    choose.cache_clear()


def row_of(kernel, documents):
    rows = []
    questions.bench_attention(kernel, documents, rows.append)
    return rows[0]


@pytest.mark.parametrize("kernel", BY_REQUEST)
def test_a_row_runs_the_kernel_of_its_name(ran, kernel):
    assert f"{kernel} here" in row_of(kernel, False)["kernel"]
    assert set(ran) == {kernel}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kernel", BY_REQUEST)
def test_a_model_runs_the_kernel_of_its_row(ran, kernel):
    # PyTorch's operations, because Triton's interpreter is slow
    variant = replace(model.SELECTIVE, attention=kernel, kernels="torch")
    assert f"{kernel} here" in model.measure(WIDE, variant)["kernel"]
    assert set(ran) == {kernel}


def test_the_automatic_choice_in_its_place_is_noticed(ran, monkeypatch):
    # Plant: the model does not hear of the wanted kernel.
    monkeypatch.setattr(mask, "choose", lambda device, call, _: choose(device, call))
    row_of("flash2", False)
    assert ran == []


def test_the_names_are_those_of_the_configuration():
    assert get_args(get_type_hints(ModelConfig)["attention_kernel"]) == ATTENTION_KERNELS


WITH_3 = PLANNED._replace(flash3=True)


@pytest.mark.parametrize(
    ("device", "kernel", "documents", "said", "operator"),
    [
        (PLANNED, AUTO, False, "cuDNN 9.20.0", CUDNN.operators[0]),
        (PLANNED, "cudnn", False, "cuDNN 9.20.0", CUDNN.operators[0]),
        (PLANNED, "flash2", False, "flash 2", FLASH2.operators[0]),
        (WITH_3, "flash3", False, "flash 3", FLASH3.operators[0]),
        (PLANNED, AUTO, True, "flash 2 (not flash 3: not installed)", FLASH2.operators[1]),
        (WITH_3, AUTO, True, "flash 3", FLASH3.operators[1]),
    ],
)
def test_a_row_names_the_kernel_that_was_chosen(
    monkeypatch, device, kernel, documents, said, operator
):
    """At full size, on tensors without data."""
    inputs = questions.inputs()
    monkeypatch.setattr(attention_choice, "PLANNED", device)
    monkeypatch.setattr("model.documents.to_device", Tensor.to)  # it knows only "cuda"
    monkeypatch.setattr(questions, "SIZES", questions.FULL)
    with AsOnGpu(), Operators() as seen, patch.object(attention_choice, "load_flash3") as load:
        attend, chosen = questions.mask_of(kernel, documents, "meta")
        attend(*(t.to("meta") for t in inputs[:3]))
    assert chosen == said
    assert seen.attention() == [operator]
    assert load.called is chosen.startswith("flash 3")


def test_another_error_of_the_configuration_is_a_failure():
    def wrong(key: str) -> None:
        with attention_kernels():
            raise UserError(key, "flash2", "a reason", "a remedy")

    with pytest.raises(pytest.skip.Exception, match="flash2: a reason"):
        wrong(attention_choice.KEY)
    with pytest.raises(UserError):
        wrong("model.dim")


def test_after_a_row_torch_has_its_own_flash_attention_again():
    """Else the rows after that of flash 3 would run it too."""
    calls: list[str] = []

    def use(kernel: str, fails: bool = False) -> None:
        attention_choice.made_ready(attention_choice.Choice(BY_REQUEST[kernel], "", ()))
        calls.append(kernel)
        if fails:
            raise RuntimeError

    torch_attention = "torch.nn.attention."
    restore = partial(calls.append, "restored")
    with (
        patch(f"{torch_attention}activate_flash_attention_impl", calls.append, create=True),
        patch(f"{torch_attention}restore_flash_attention_impl", restore, create=True),
    ):
        for kernel in ("flash3", "flash2", "flash3"):
            with attention_kernels():
                use(kernel)
        with pytest.raises(RuntimeError), attention_kernels():
            use("flash3", fails=True)
        # within a run too: an examination's flash 2 between steps of flash 3
        for kernel in ("flash3", "flash2", "flash2", "flash3", "flash2"):
            use(kernel)
    flash3 = ["FA3", "flash3", "restored"]
    within_a_run = [*flash3, "flash2", "flash2", *flash3, "flash2"]
    assert calls == [*flash3, "flash2", *flash3, *flash3, *within_a_run]


@pytest.mark.parametrize("documents", [False, True])
def test_another_mask_is_found(monkeypatch, documents):
    row_of(AUTO, documents)
    found = questions.mask_of(AUTO, not documents)
    monkeypatch.setattr(questions, "mask_of", lambda *_: found)
    with pytest.raises(AssertionError, match="off by"):
        row_of(AUTO, documents)
