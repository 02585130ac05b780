"""Draws docs/images/kernels.svg: the bytes that operations move, apart and fused, and the memory of the head.
`python -m docs.draw_kernels`

Apart: each operation of the formula, written in PyTorch as in the papers, reads its inputs and writes its output; counted while
it runs, on small tensors. Fused: what the kernels' files say, which tests/test_kernel_bytes.py holds against the kernels.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.kernels.linear_cross_entropy import PIECE_BYTES

matplotlib.use("svg")
import matplotlib.pyplot as plt

T, D, V = 256, 512, 1024
# Forward and backward, without the small terms.
FUSED = {"RMSNorm": (4, 6), "sum + RMSNorm": (8, 8), "rotation": (4, 4), "SwiGLU": (6, 10), "cross-entropy": (2, 4)}
WAYS = ("forward", "backward")
APART, TOGETHER, INK = "#c2410c", "#1d4ed8", "#1f2937"


class Bytes(TorchDispatchMode):
    """Bytes read and written by every operation that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}.values()
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in inputs}
        if not all(t.untyped_storage().data_ptr() in storages for t in outputs) or func.name().endswith("_"):
            self.moved += sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        return result


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def cross_entropy(z: Tensor) -> Tensor:
    return -torch.log_softmax(z.float(), -1)[:, 0].sum()


def moved_apart(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
    """Bytes per element of the first input in forward and in backward."""
    with Bytes() as forward:
        y = function(*inputs)
    with Bytes() as backward:
        y.backward(torch.ones_like(y))
    n = inputs[0].numel()
    return forward.moved / n, backward.moved / n


def apart() -> dict[str, tuple[float, float]]:
    """Of each operation of FUSED."""

    def bf16(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16().requires_grad_()

    x, r, w, z = bf16(T, D), bf16(T, D), bf16(D), bf16(T, V)
    angles = torch.randn(T, 1, 64).bfloat16()
    return {
        "RMSNorm": moved_apart(rms_norm, x, w),
        "sum + RMSNorm": moved_apart(lambda a, b, c: rms_norm(a + b, c), x, r, w),
        "rotation": moved_apart(rotation, bf16(T, 8, 64), angles, angles),
        "SwiGLU": moved_apart(lambda g, u: g * torch.sigmoid(g) * u, x, r),
        "cross-entropy": moved_apart(cross_entropy, z),
    }


def head_memory(tokens: int, vocab: int, piece_bytes: int) -> tuple[float, float]:
    """GiB of the logits and what becomes of them: whole (bfloat16, float32, softmax, gradient, and back), and in pieces."""
    whole = tokens * vocab * (2 + 4 + 4 + 4 + 2)
    return whole / 2**30, min(tokens * vocab * 2, piece_bytes) / 2**30


def main() -> None:
    counted = apart()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2))
    rows = [(f"{name}, {way}", counted[name][i], FUSED[name][i]) for name in FUSED for i, way in enumerate(WAYS)]
    for y, (label, a, b) in enumerate(reversed(rows)):
        left.barh(y + 0.2, a, 0.4, color=APART, label="apart" if y == 0 else None)
        left.barh(y - 0.2, b, 0.4, color=TOGETHER, label="one kernel" if y == 0 else None)
        left.text(max(a, b) + 0.5, y, f"{a:.0f} → {b}", va="center", color=INK, fontsize=8)
        print(f"{label:24} apart {a:5.1f}   one kernel {b:2} bytes per element")
    left.set_yticks(range(len(rows)), [label for label, *_ in reversed(rows)], fontsize=8)
    left.set_xlabel("bytes moved per element, bfloat16")
    left.legend(loc="lower right", fontsize=8, frameon=False)
    tokens = [2**k for k in range(10, 17)]
    whole, pieces = zip(*(head_memory(t, 128_256, PIECE_BYTES["cuda"]) for t in tokens), strict=True)
    right.plot(tokens, whole, color=APART, marker="o", label="whole logits")
    right.plot(tokens, pieces, color=TOGETHER, marker="o", label="in pieces")
    for t, a, b in zip(tokens, whole, pieces, strict=True):
        print(f"head, {t:6} tokens: {a:6.1f} GiB whole, {b:4.1f} GiB in pieces")
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    right.set_xlabel("tokens of a micro-batch, vocabulary of 128,256")
    right.set_ylabel("GiB held at the loss")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    out = Path(__file__).parent / "images" / "kernels.svg"
    matplotlib.rcParams["svg.hashsalt"] = "lattice"  # the same file every time
    figure.savefig(out, metadata={"Date": None})
    print(f"drew {out.name}")


if __name__ == "__main__":
    main()
