"""The head's projection with its loss, as a GPU benchmark compares it (gpu_operations.py)."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.gpu_check import Check, poisoned_memory
from benchmarks.gpu_operations import Case, draw, liger
from benchmarks.gpu_timing import DEVICE, Work, compiled
from model.kernels.linear_cross_entropy import linear_cross_entropy
from model.matmul import Matmul

HEAD_PASS = "forward + backward"
# Bounds for logits rounded to bfloat16: the rounding error of one between 8 and 16 is up to 1/32,
# and so is the relative error of its probability p. The errors of dx and dw are relative to the
# largest value of the softmax's part, all of which would be wrong if p were omitted or counted
# twice.
HEAD_BOUND = 5e-2
# The relative error of one token's loss. Errors have either sign, so the mean over T tokens is √T
# times more accurate: 1.1e-4 for 8192.
HEAD_TOKEN_BOUND = 1e-2
# standard deviation of the logits: some tokens are likely, so that their p matters beside the
# targets' 1
HEAD_LOGITS = 3.0


class Head:
    """The head's projection with its loss, x [T, 1, D] and weight [V, D]. `matmul` runs only the
    three products that it contains, unsplit: the time if the loss were free."""

    def __init__(self, tokens: int, width: int, vocab: int, group: ProcessGroup) -> None:
        self.x = draw(tokens, 1, width)
        self.weight = draw(vocab, width, scale=HEAD_LOGITS * width**-0.5)
        self.targets = torch.randint(vocab, (tokens, 1), device=DEVICE)
        self.scale, self.vocab, self.group = torch.tensor(1 / tokens, device=DEVICE), vocab, group
        self.of_compiler = compiled(self.plain)

    def ours(self, x: Tensor, weight: Tensor) -> Tensor:
        given = x, weight, self.targets, self.scale, 0, self.group, False
        options = {"matmul": Matmul(), "vocab_size": self.vocab, "kernels": "triton"}
        return linear_cross_entropy(*given, **options)

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x.flatten(0, 1), weight).float(), self.targets.flatten())

    def by_liger(self, x: Tensor, weight: Tensor) -> Tensor:
        return liger().liger_fused_linear_cross_entropy(
            x.flatten(0, 1), weight, self.targets.flatten()
        )

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()

    def work(self, implementation: str, name_of_pass: str) -> Work:
        if implementation == "matmul":
            return Work(lambda: self.x.flatten(0, 1), self.three_products)
        functions = {
            "triton": self.ours,
            "torch": self.plain,
            "compile": self.of_compiler,
            "liger": self.by_liger,
        }
        function = functions[implementation]

        def run(leaves: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(*leaves), leaves)

        return Work(self.leaves, run)

    def three_products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.mm(x, self.weight.T)
        return torch.mm(z, self.weight), torch.mm(z.T, x)

    def check(self) -> list[Check]:
        leaves = self.leaves()
        with poisoned_memory():
            loss = self.ours(*leaves)
            dx, dw = torch.autograd.grad(loss, leaves)
            found = {"loss": loss.detach(), "dx": dx, "dw": dw}
        exact, of_softmax = self.exact()
        off = abs(found["loss"].item() / exact["loss"].item() - 1)
        checks = [Check("loss", off, HEAD_TOKEN_BOUND / len(self.targets) ** 0.5)]
        for name, largest in of_softmax.items():
            error = (found[name].double() - exact[name]).abs().max() / largest
            checks.append(Check(name, error.item(), HEAD_BOUND))
        return checks

    def exact(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The exact results in float64, computed for a part of the tokens at a time, because whole
        logits would take several times 8 GB; and the largest values of the softmax's part of dx and
        of dw, which the targets' part could hide."""
        x, weight = self.x.flatten(0, 1).double(), self.weight.double()
        targets = self.targets.flatten()
        loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
        dw, dxs = torch.zeros_like(weight), []
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
        return {"loss": loss, "dx": dx.view(self.x.shape), "dw": dw}, of_softmax


def head_case(tokens: int, width: int, vocab: int, group: ProcessGroup) -> Case:
    shape = f"T {tokens}, D {width}, V {vocab}"
    build = lambda: Head(tokens, width, vocab, group)  # noqa: E731
    implementations = ("triton", "matmul", "torch", "compile", "liger")
    # Ours sums it in float32. Eager's peak occurs before its weight gradient exists, so its other
    # memory is larger than the difference.
    weight_gradient = {"triton": 4 * vocab * width, "torch": 2 * vocab * width}
    return Case(
        "linear_cross_entropy", shape, {HEAD_PASS: None}, implementations, build, weight_gradient
    )
