"""What overlaps: deferred weight gradients, whose jobs release their tensors when they finish; and
what runs between the start of a collective in one place and the wait for it in another."""

import gc
import weakref
from functools import partial

import torch
from torch.nn import functional

from model.kernels.weighted_swiglu import weighted_swiglu
from model.matmul import GroupedMatmul, Matmul
from parallel.asynchronous import Start, Wait
from parallel.collectives import ONE_RANK
from parallel.layer import TensorParallel
from parallel.tensor import ColumnParallelFunction, side_by_side
from parallel.weight_gradient import Job, Place, WeightGradient, deferring, run_jobs
from tests.kernels.device import NEEDS_TRITON


class LoggedJob(Job):
    """A job that logs the number of live jobs when it starts and when it finishes."""

    def __init__(self, alive, log):
        super().__init__(torch.numel, [torch.zeros(3)], gather_over=[ONE_RANK])
        self.alive, self.log = alive, log
        alive.add(self)

    def start(self):
        super().start()
        self.log.append(("start", len(self.alive)))

    def finish(self):
        super().finish()
        self.log.append(("finish", len(self.alive)))


def test_jobs_overlap_and_are_let_go():
    """At any time at most two jobs have started and not finished: one computes, and the next
    gathers. A finished gradient between two linear layers (here after the first) does not end this
    overlap. Finished jobs are freed at once, and the list is emptied."""
    alive, log = weakref.WeakSet(), []
    gradient = WeightGradient([2])
    gradient.sum_in(Place(), torch.float32)
    with deferring([gradient]) as jobs:
        for _ in range(2):
            assert gradient.add(torch.ones(2)) is None
    assert gradient.total is None
    jobs.insert(0, LoggedJob(alive, log))
    jobs += [LoggedJob(alive, log) for _ in range(4)]
    run_jobs(jobs)
    gc.collect()
    assert jobs == []
    assert [left for what, left in log if what == "finish"] == [5, 4, 3, 2, 1]
    assert [what for what, _ in log[:4]] == ["start", "start", "finish", "start"]
    assert gradient.total.tolist() == [2, 2]


def noted(between):
    """The calls of a start with two waits, and of another product between them, or after them."""
    notes, x, w = [], *(torch.ones((), requires_grad=True) for _ in range(2))

    def note(what, result=None):
        notes.append(what)
        return result

    def other():
        y = note("product", w * 1)
        y.register_hook(lambda _: note("its gradient"))
        return y

    link = Start.apply(lambda _: note("start"), lambda: note("gradients", (x + 6,)), x)
    first = other() if between else torch.zeros(())
    start_gradients = partial(note, "start gradients")
    ys = [Wait.apply(link, lambda: note("wait", (x + 2,)), start_gradients)[0] for _ in range(2)]
    (sum(ys) + (first if between else other())).backward()
    assert (x.grad, w.grad) == (7, 1)
    return notes


def test_what_is_between_overlaps_in_forward_and_backward():
    """Control: a product after the waits overlaps nothing."""
    there, back = ["wait"] * 2, ["start gradients"] * 2
    assert noted(True) == ["start", "product", *there, *back, "its gradient", "gradients"]
    assert noted(False) == ["start", *there, "product", "its gradient", *back, "gradients"]


def noting(products, seen):
    """`products` that note the width and the strides of each dy of which they form dx."""

    class Noting(type(products)):
        def input_gradient(self, dy, weight, *others, **options):
            seen.append((dy.shape[-1], dy.is_contiguous()))
            return super().input_gradient(dy, weight, *others, **options)

    products.__class__ = Noting
    return products


def read_by(x, weights, products):
    """What layers that read x compute."""
    gradients = [WeightGradient() for _ in weights]
    return ColumnParallelFunction.apply(
        x, TensorParallel(), [products] * len(weights), gradients, None, None, *weights
    )


def test_narrow_layers_pass_over_dx_once():
    """The input gradients of two narrow layers are one product. Control: those of wider ones are
    two."""
    for narrow, widths in ((8, [64, 16]), (16, [64, 16, 16])):
        weights = [torch.randn(width, 64, dtype=torch.float64) for width in (64, narrow, narrow)]
        x, seen = torch.randn(9, 2, 64, dtype=torch.float64, requires_grad=True), []
        ys = read_by(x, weights, noting(Matmul(), seen))
        dys = [torch.randn_like(y) for y in ys]
        torch.autograd.backward(ys, dys)
        assert [width for width, _ in seen] == widths
        each = sum(dy @ weight for dy, weight in zip(dys, weights, strict=True))
        torch.testing.assert_close(x.grad, each)


@NEEDS_TRITON
def test_small_experts_have_one_product_of_the_gradient_that_swiglu_wrote():
    """A copy of their dy would cost half of what it saves. Controls: wider experts have two; parts
    in another order, or of two tensors, are copied."""
    ends = torch.tensor([5, 9], dtype=torch.int32)
    for width, expected in ((16, [(32, True)]), (32, [(32, False)] * 2)):
        weights = [torch.randn(2, width, 64, dtype=torch.float64) for _ in range(2)]
        x, seen = torch.randn(9, 64, dtype=torch.float64, requires_grad=True), []
        gate, up = read_by(x, weights, noting(GroupedMatmul(ends, "torch"), seen))
        weighted_swiglu(gate, up, torch.ones(9).double(), "triton").square().sum().backward()
        assert seen == expected
        dx, x.grad = x.grad, None
        gate, up = (torch.cat([x[:5] @ w[0].T, x[5:] @ w[1].T]) for w in weights)
        (functional.silu(gate) * up).square().sum().backward()
        torch.testing.assert_close(dx, x.grad)
    whole = torch.randn(9, 8)
    a, b = whole.chunk(2, 1)
    assert side_by_side((a, b)) is whole
    for parts in ((b, a), (a, b.clone()), (a.clone(), b)):
        assert torch.equal(side_by_side(parts), torch.cat(parts, 1))
