"""The head's projection with its loss, as a GPU benchmark compares it (operations.py)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.operations import Case, draw, liger
from benchmarks.gpu.timing import DEVICE, Work, compiled
from model.linear_cross_entropy import linear_cross_entropy
from model.matmul import Matmul
from parallel.layer import TensorParallel

HEAD, HEAD_PASS = "linear_cross_entropy", "forward + backward"
# standard deviation of the logits: some tokens are likely, so that their p matters beside the
# targets' 1
HEAD_LOGITS = 3.0


class Head:
    """The head's projection with its loss, x [T, 1, D] and weight [V, D]. `matmul` runs only the
    three products that it contains, unsplit: the time if the loss were free."""

    def __init__(self, tokens: int, width: int, vocab: int) -> None:
        self.x = draw(tokens, 1, width)
        self.weight = draw(vocab, width, scale=HEAD_LOGITS * width**-0.5)
        self.targets = torch.randint(vocab, (tokens, 1), device=DEVICE)
        self.scale, self.vocab = torch.tensor(1 / tokens, device=DEVICE), vocab
        self.of_compiler = compiled(self.plain)

    def ours(self, x: Tensor, weight: Tensor) -> Tensor:
        given = x, weight, self.targets, self.scale, 0, TensorParallel()
        options = {"matmul": Matmul(), "vocab_size": self.vocab, "kernels": "triton"}
        return linear_cross_entropy(*given, **options)

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x.flatten(0, 1), weight).float(), self.targets.flatten())

    def by_liger(self, x: Tensor, weight: Tensor) -> Tensor:
        fused = liger().liger_fused_linear_cross_entropy
        return fused(x.flatten(0, 1), weight, self.targets.flatten())

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()

    def work(self, implementation: str, name_of_pass: str) -> Work:
        if implementation == "matmul":
            return Work(lambda: self.x.flatten(0, 1), self.three_products)
        function = {
            "triton": self.ours,
            "torch": self.plain,
            "compile": self.of_compiler,
            "liger": self.by_liger,
        }[implementation]
        return Work(self.leaves, lambda leaves: torch.autograd.grad(function(*leaves), leaves))

    def three_products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.mm(x, self.weight.T)
        return torch.mm(z, self.weight), torch.mm(z.T, x)


def head_case(tokens: int, width: int, vocab: int) -> Case:
    implementations = ("triton", "matmul", "torch", "compile", "liger")
    shape, passes = f"T {tokens}, D {width}, V {vocab}", {HEAD_PASS: None}
    return Case(HEAD, shape, passes, lambda: Head(tokens, width, vocab), implementations)


def compare(width: int, vocab: int, ours: dict, products: dict, eager: dict) -> dict[str, float]:
    """The time over that of the products; and the memory over that of eager PyTorch, without the
    weight's gradient (ours is summed in float32; eager's peak occurs before its own exists, so its
    other memory is larger than the difference)."""
    times = [row["milliseconds"]["median"] for row in (ours, products)]
    found = {"over_three_products": times[0] / times[1]}
    if ours["peak_memory_bytes"] is not None:
        peaks = ours["peak_memory_bytes"], eager["peak_memory_bytes"]
        beyond = peaks[0] - 4 * vocab * width, peaks[1] - 2 * vocab * width
        found["memory_over_eager"] = beyond[0] / beyond[1]
    return found
