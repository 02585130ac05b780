"""What runs when, if a collective is started in one place and awaited in another."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel.asynchronous import Start, Wait


def noted(between: bool) -> list[str]:
    """The calls of a start with two waits, and of another product between them, or after them."""
    notes, x, w = list[str](), *(torch.ones((), requires_grad=True) for _ in range(2))

    def note(what: str, result: Any = None) -> Any:
        notes.append(what)
        return result

    def other() -> Tensor:
        y: Tensor = note("product", w * 1)
        y.register_hook(lambda _: note("its gradient"))
        return y

    link = Start.apply(lambda _: note("start"), lambda: note("gradients", (x + 6,)), x)
    first = other() if between else torch.zeros(())
    start_gradients = partial(note, "start gradients")
    ys = [Wait.apply(link, lambda: note("wait", (x + 2,)), start_gradients)[0] for _ in range(2)]
    (sum(ys) + (first if between else other())).backward()
    assert (x.grad, w.grad) == (7, 1)
    return notes


def test_what_is_between_overlaps_in_forward_and_backward() -> None:
    """Control: a product after the waits overlaps nothing."""
    there, back = ["wait"] * 2, ["start gradients"] * 2
    assert noted(True) == ["start", "product", *there, *back, "its gradient", "gradients"]
    assert noted(False) == ["start", *there, "product", "its gradient", *back, "gradients"]
