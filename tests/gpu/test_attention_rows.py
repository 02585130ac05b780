"""The rows that compare kernels of attention: each runs the kernel of its name, says which one that
was, and does not affect the next."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
from torch import Tensor

from benchmarks.gpu import attention, model
from benchmarks.gpu.programs import AUTO, WIDE, attention_kernels
from errors import UserError
from model import mask
from model.kernels import attention_choice
from model.kernels.attention import Kernel, by_torch
from model.kernels.attention_choice import BY_REQUEST, Choice, choose, made_ready
from model.kernels.backend import why_not_triton
from tests.planted import planted

pytestmark = pytest.mark.skipif(why_not_triton("cpu") is not None, reason="needs Triton")


@pytest.fixture
def ran():
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
    attention.bench_attention(kernel, documents, rows.append)
    return rows[0]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kernel", BY_REQUEST)
def test_a_row_runs_the_kernel_of_its_name(ran, kernel):
    assert f"{kernel} here" in row_of(kernel, False)["kernel"]
    assert set(ran) == {kernel}
    ran.clear()
    # a whole model; by PyTorch's operations, because Triton's interpreter is slow
    variant = replace(model.SELECTIVE, attention=kernel, kernels="torch")
    assert f"{kernel} here" in model.measure(WIDE, variant)["kernel"]
    assert set(ran) == {kernel}


def test_the_automatic_choice_in_its_place_is_noticed(ran, monkeypatch):
    # Plant: the model does not hear of the wanted kernel.
    monkeypatch.setattr(mask, "choose", lambda device, call, _: choose(device, call))
    row_of("flash2", False)
    assert ran == []


def test_after_a_row_torch_has_its_own_flash_attention_again(monkeypatch):
    """Else the rows after that of flash 3 would run it too. A kernel that cannot run is skipped;
    another error of the configuration is a failure."""
    calls: list[str] = []

    def use(kernel: str, wrong_key: str = "") -> None:
        made_ready(Choice(BY_REQUEST[kernel], "", ()))
        calls.append(kernel)
        if wrong_key:
            raise UserError(wrong_key, kernel, "a reason", "a remedy")

    restore = partial(calls.append, "restored")
    for name, instead in (("activate", calls.append), ("restore", restore)):
        of_torch = f"torch.nn.attention.{name}_flash_attention_impl"
        monkeypatch.setattr(of_torch, instead, raising=False)
    for kernel in ("flash3", "flash2", "flash3"):
        with attention_kernels():
            use(kernel)
    with pytest.raises(pytest.skip.Exception, match="flash3: a reason"), attention_kernels():
        use("flash3", attention_choice.KEY)
    # BaseException, because a test that is skipped would not fail
    with pytest.raises(BaseException, match="a reason") as failed, attention_kernels():
        use("flash3", "model.dim")
    assert failed.type is UserError
    # within a run too: an examination's flash 2 between steps of flash 3
    for kernel in ("flash3", "flash2", "flash2", "flash3", "flash2"):
        use(kernel)
    flash3 = ["FA3", "flash3", "restored"]
    within_a_run = [*flash3, "flash2", "flash2", *flash3, "flash2"]
    assert calls == [*flash3, "flash2", *flash3 * 3, *within_a_run]


@pytest.mark.parametrize("documents", [False, True])
def test_another_mask_is_found(monkeypatch, documents):
    row_of(AUTO, documents)
    found = attention.mask_of(AUTO, not documents)
    monkeypatch.setattr(attention, "mask_of", lambda *_: found)
    with pytest.raises(AssertionError, match="off by"):
        row_of(AUTO, documents)
