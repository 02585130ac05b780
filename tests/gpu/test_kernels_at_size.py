"""Every kernel at the sizes of an 8-billion model, compared with float64; and, at tiny sizes, that
a wrong kernel is found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import operations, optimizer
from benchmarks.gpu.kernels import list_cases
from benchmarks.gpu.operations import FULL, SIZES, TINY
from model import linear_cross_entropy
from tests.gpu.checks import check, wrong
from tests.planted import from_table

NAMES = [case.name for case in list_cases(FULL)]


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_at_full_size(name: str) -> None:
    torch.manual_seed(0)
    assert wrong(check(list_cases(SIZES)[NAMES.index(name)].build())) == []


def wrong_norm(_, x, weight, eps, kernels):
    return functional.rms_norm(x, weight.shape, weight, 0.1)


def a_row_not_written(_, x, weight, eps, kernels):
    """Otherwise correct. Reused memory could by chance hold the right numbers there."""
    y = functional.rms_norm(x, weight.shape, weight, eps)
    never_written = torch.empty_like(y[:1])
    return torch.cat((never_written + 0 * y[:1], y[1:]))


def other_random_bits(adamw, p, g, m, v, decays, places, *rest):
    if rest[-1] == "triton":
        places = [place._replace(key=place.key + 1) for place in places]
    adamw(p, g, m, v, decays, places, *rest)


def wrong_gradient(mistake: Callable[[Tensor, Tensor], Tensor]) -> tuple[Any, ...]:
    """A row of MISTAKES: the gradient over logits, scale · (p − onehot), is a wrong one."""

    def replacement(right, z, targets, row, scale, *rest):
        right(z, targets, row, scale, *rest)
        z.copy_(mistake(z.float(), scale * functional.one_hot(targets, z.shape[1])))

    return linear_cross_entropy, "gradient_over_logits_", replacement, HEAD, ["dx", "dw"]


NORM, HEAD = ("rms_norm 64", ["output 0", "gradient 0", "gradient 1"]), "linear_cross_entropy"
MISTAKES = {  # name → (module, name in it, replacement, kernel, its results that are then wrong)
    "wrong norm": (operations, "rms_norm", wrong_norm, *NORM),
    "a row not written": (operations, "rms_norm", a_row_not_written, *NORM),
    "wrong sum": (optimizer, "square_sum", lambda right, *given: right(*given) * (1 + 1e-9),
                  "gradient_norm", ["norm"]),
    "other random bits": (optimizer, "adamw", other_random_bits, "adamw bfloat16", ["bits"]),
    "wrong loss": (linear_cross_entropy, "token_losses",
                   lambda right, *given: 1.01 * right(*given), HEAD, ["loss"]),
    # a head that still learns, but only from its targets
    "without softmax": wrong_gradient(lambda z, onehot: -onehot),
    "softmax twice": wrong_gradient(lambda z, onehot: 2 * (z + onehot) - onehot),
    "without targets": wrong_gradient(lambda z, onehot: z + onehot),
}  # fmt: skip


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("what", MISTAKES)
def test_a_wrong_result_is_found_by_name(what: str) -> None:
    *_, name, found = MISTAKES[what]
    (subject,) = (case.build() for case in list_cases(TINY) if case.name == name)
    with from_table(__name__, what):
        assert [each.what for each in wrong(check(subject))] == found
