"""Comparisons of results with float64, on the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.head import Head
from benchmarks.gpu.operations import Operation
from benchmarks.gpu.optimizer import NORM, RATES, Norm, Update


class Check(NamedTuple):
    what: str
    error: float  # compared with float64
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # false if the error is NaN


def wrong(checks: list[Check]) -> list[Check]:
    assert checks
    return [check for check in checks if not check.passed]


def against_exact(what: str, found: Tensor, exact: Tensor) -> Check:
    """Checks the largest error, with the bound of tests/kernels/test_kernels.py."""
    assert found.shape == exact.shape, f"{what}: {tuple(found.shape)} is not {tuple(exact.shape)}"
    error = (found.double() - exact).abs().max().item()
    if found.dtype == torch.bfloat16:
        return Check(what, error, 1.1 * (exact.bfloat16().double() - exact).abs().max().item())
    return Check(what, error, 2e-6 * exact.abs().max().item())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """PyTorch fills the result of `torch.empty` with NaN, so that an output that a kernel does not
    write is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(subject: Operation | Norm | Update | Head) -> list[Check]:
    """Compares our kernels with float64."""
    checks = {Operation: of_operation, Norm: of_norm, Update: of_update, Head: of_head}
    return checks[type(subject)](subject)


def of_operation(operation: Operation) -> list[Check]:
    with poisoned_memory():
        outputs, leaves, directions = operation.work("triton", "backward").prepare()
        outputs_found = [y.detach() for y in outputs]
        found = [*outputs_found, *torch.autograd.grad(outputs, leaves, directions)]
    leaves = [x.double().requires_grad_() for x in operation.inputs]
    outputs = operation.exact(*leaves)
    directions = [d.double() for d in operation.directions]
    exact = [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, directions)]
    names = [f"output {i}" for i in range(len(outputs))]
    names += [f"gradient {i}" for i in range(len(leaves))]
    return [against_exact(n, f, e) for n, f, e in zip(names, found, exact, strict=True)]


def of_norm(norm: Norm) -> list[Check]:
    with poisoned_memory():
        found = norm.ours().item()
    squares = [g.double().square().sum() for g in norm.gradients]
    exact = torch.stack(squares).sum().sqrt().item()
    # the bound allows for sums of 10⁹ squares in another order
    return [Check("norm", abs(found / exact - 1), 1e-12)]


def of_update(update: Update) -> list[Check]:
    before = [[t.clone() for t in tensors] for tensors in (update.p, update.g, update.m, update.v)]
    t = update.updates.item() + 1
    with poisoned_memory():
        update.update("triton")
    largest: dict[str, list[Tensor]] = {"p": [], "m": [], "v": []}  # error and value, by tensor
    # one tensor at a time, because float64 is large
    for i, old in enumerate(zip(*before, strict=True)):
        exact = exact_update([x.double() for x in old], t, update.decays[i])
        for name, found in zip(largest, (update.p[i], update.m[i], update.v[i]), strict=True):
            error, magnitude = (found.double() - exact[name]).abs(), exact[name].abs()
            # stochastic rounding may give either bfloat16 neighbour; they are 2⁻⁷ apart
            if update.dtype == torch.bfloat16:
                error = (error - 2**-7 * magnitude).clamp(min=0)
            largest[name].append(torch.stack((error.max(), magnitude.max())))
    checks = []
    for name, each in largest.items():
        error, size = torch.stack(each).amax(0).tolist()  # NaN if any is
        checks.append(Check(name, error, 2e-6 * size))
    return checks + [bits(update, before)] * (update.dtype == torch.bfloat16)


def bits(update: Update, before: list[list[Tensor]]) -> Check:
    """Checks that kernel and reference round with the same random bits. If their float32 results
    differ by an ulp, the rounded ones differ with a probability of 2⁻¹⁶. So nearly all numbers
    agree, but with different random bits about half of them would not."""
    found = [*update.p, *update.m, *update.v]
    update.p, update.g, update.m, update.v = before
    update.updates -= 1
    update.update("torch")
    pairs = zip(found, [*update.p, *update.m, *update.v], strict=True)
    differing = sum((a != b).sum().item() for a, b in pairs)
    return Check("bits", differing / sum(a.numel() for a in found), 1e-3)


def exact_update(old: list[Tensor], t: float, decay: float) -> dict[str, Tensor]:
    """AdamW in float64, as in model/kernels/adamw.py."""
    p, g, m, v = old
    g = g * min(1.0, RATES.max_norm / NORM)
    m = RATES.betas[0] * m + (1 - RATES.betas[0]) * g
    v = RATES.betas[1] * v + (1 - RATES.betas[1]) * g * g
    one, two = (1 - beta**t for beta in RATES.betas)
    p = p - RATES.lr * decay * p - RATES.lr / one * m / ((v / two).sqrt() + RATES.eps)
    return {"p": p, "m": m, "v": v}


# Bounds for logits rounded to bfloat16: the rounding error of one between 8 and 16 is up to 1/32,
# and so is the relative error of its probability p. The errors of dx and dw are relative to the
# largest value of the softmax's part, all of which would be wrong if p were omitted or counted
# twice.
HEAD_BOUND = 5e-2
# The relative error of one token's loss. Errors have either sign, so the mean over T tokens is √T
# times more accurate: 1.1e-4 for 8192.
HEAD_TOKEN_BOUND = 1e-2


def of_head(head: Head) -> list[Check]:
    leaves = head.leaves()
    with poisoned_memory():
        loss = head.ours(*leaves)
        dx, dw = torch.autograd.grad(loss, leaves)
    exact, of_softmax = exact_head(head)
    off = abs(loss.item() / exact["loss"].item() - 1)
    checks = [Check("loss", off, HEAD_TOKEN_BOUND / len(head.targets) ** 0.5)]
    for name, found in (("dx", dx), ("dw", dw)):
        error = (found.double() - exact[name]).abs().max() / of_softmax[name]
        checks.append(Check(name, error.item(), HEAD_BOUND))
    return checks


def exact_head(head: Head) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The exact results in float64, computed for a part of the tokens at a time, because whole
    logits would take several times 8 GB; and the largest values of the softmax's part of dx and of
    dw, which the targets' part could hide."""
    x, weight = head.x.flatten(0, 1).double(), head.weight.double()
    targets = head.targets.flatten()
    loss, dw, dxs = x.new_zeros(()), torch.zeros_like(weight), []
    for rows, y in zip(x.split(2048), targets.split(2048), strict=True):
        z = rows @ weight.T
        loss += F.cross_entropy(z, y, reduction="sum") / len(targets)
        p = z.softmax(-1) / len(targets)
        dxs.append(p @ weight)
        dw.addmm_(p.T, rows)
    dx = torch.cat(dxs)
    of_softmax = {"dx": dx.abs().max(), "dw": dw.abs().max()}
    dx -= weight[targets] / len(targets)
    dw.index_add_(0, targets, x, alpha=-1 / len(targets))
    return {"loss": loss, "dx": dx.view(head.x.shape), "dw": dw}, of_softmax
