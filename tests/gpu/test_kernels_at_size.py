"""Every kernel at the sizes of an 8-billion model, compared with float64; and, at tiny sizes, that
a wrong kernel is found."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import operations, optimizer
from benchmarks.gpu.kernels import list_cases
from benchmarks.gpu.operations import FULL, SIZES, TINY
from model.kernels import linear_cross_entropy
from tests.gpu.checks import Check, check, wrong
from tests.planted import planted

NAMES = [case.name for case in list_cases(FULL)]


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_at_full_size(name: str) -> None:
    torch.manual_seed(0)
    assert wrong(check(list_cases(SIZES)[NAMES.index(name)].build())) == []


def wrong_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 0.1)


def forgetful_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Correct except for one row that is never written. Reused memory could by chance hold the
    right numbers there."""
    y = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    never_written = torch.empty_like(y[:1])
    return torch.cat((never_written + 0 * y[:1], y[1:]))


def norm(mistake: Callable[..., Tensor]) -> Callable[[], Any]:
    return planted(operations, "rms_norm")(lambda _, x, w, eps, kernels: mistake(x, w, eps))


@planted(optimizer, "square_sum")
def wrong_sum(square_sum, *arguments):
    return square_sum(*arguments) * (1 + 1e-9)


@planted(optimizer, "adamw")
def other_random_bits(adamw, p, g, m, v, decays, places, *rest):
    if rest[-1] == "triton":
        places = [dataclasses.replace(place, key=place.key + 1) for place in places]
    adamw(p, g, m, v, decays, places, *rest)


@planted(linear_cross_entropy, "token_losses")
def wrong_loss(token_losses, *arguments):
    return 1.01 * token_losses(*arguments)


def gradient(mistake: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """Replaces the gradient over logits, scale · (p − onehot), by a wrong one."""

    @planted(linear_cross_entropy, "gradient_over_logits_")
    def gradient_over_logits_(right, z, targets, row, scale, *rest):
        right(z, targets, row, scale, *rest)
        onehot = scale * torch.nn.functional.one_hot(targets, z.shape[1])
        z.copy_(mistake(z.float(), onehot))

    return gradient_over_logits_


NORM = ["output 0", "gradient 0", "gradient 1"]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("mistake", "name", "found"),
    [
        pytest.param(norm(wrong_norm), "rms_norm 64", NORM, id="wrong norm"),
        pytest.param(norm(forgetful_norm), "rms_norm 64", NORM, id="a row not written"),
        pytest.param(wrong_sum, "gradient_norm", ["norm"], id="wrong sum"),
        pytest.param(other_random_bits, "adamw bfloat16", ["bits"], id="other random bits"),
        pytest.param(wrong_loss, "linear_cross_entropy", ["loss"], id="wrong loss"),
        # a head that still learns, but only from its targets
        *(
            pytest.param(gradient(mistake), "linear_cross_entropy", ["dx", "dw"], id=what)
            for what, mistake in {
                "without softmax": lambda z, onehot: -onehot,
                "softmax twice": lambda z, onehot: 2 * (z + onehot) - onehot,
                "without targets": lambda z, onehot: z + onehot,
            }.items()
        ),
    ],
)
def test_a_wrong_result_is_found_by_name(
    mistake: Callable[[], Any], name: str, found: list[str]
) -> None:
    (subject,) = (case.build() for case in list_cases(TINY) if case.name == name)
    with mistake():
        assert [each.what for each in wrong(check(subject))] == found


def test_an_error_that_is_no_number_is_no_small_error() -> None:
    assert Check("y", 0.5, 0.5).passed
    assert not Check("y", float("nan"), 0.5).passed
    assert not Check("y", 0.5, float("nan")).passed
