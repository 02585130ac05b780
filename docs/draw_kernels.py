"""Draws docs/images/kernels.svg: the bytes that operations move, apart and fused, and the memory of
the head. `python -m docs.draw_kernels`

Apart: the formula in PyTorch, as the papers write it, where each operation reads its inputs and
writes its output. The bytes are counted while it runs on small tensors. Fused: the bytes stated in
the kernels' files, which tests/kernels/test_kernel_bytes.py compares with the kernels.

Memory of the head: the peak of the bytes that exist during forward and backward, without input and
weight. It is counted while they run on tensors without data.
"""

import weakref
from collections.abc import Callable
from unittest import mock

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from docs.svg import IMAGES
from model.kernels.linear_cross_entropy import PIECE_BYTES, linear_cross_entropy
from model.matmul import Matmul

matplotlib.use("svg")
import matplotlib.pyplot as plt

T, D, V = 256, 512, 1024
HEAD_D, HEAD_V = 4096, 128_256
# Bytes per element in forward and backward, without the small terms.
FUSED = {
    "RMSNorm": (4, 6),
    "sum + RMSNorm": (8, 8),
    "rotation": (4, 4),
    "SwiGLU": (6, 10),
    "cross-entropy": (2, 4),
}
WAYS = ("forward", "backward")
APART, TOGETHER, INK = "#c2410c", "#1d4ed8", "#1f2937"


class Bytes(TorchDispatchMode):
    """Counts the bytes that every operation reads and writes, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}.values()
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in inputs}
        if not all(
            t.untyped_storage().data_ptr() in storages for t in outputs
        ) or func.name().endswith("_"):
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
    """The bytes moved per element of the first input, in forward and in backward."""
    with Bytes() as forward:
        y = function(*inputs)
    with Bytes() as backward:
        y.backward(torch.ones_like(y))
    n = inputs[0].numel()
    return forward.moved / n, backward.moved / n


def apart() -> dict[str, tuple[float, float]]:
    """The bytes per element, forward and backward, of each operation of FUSED in plain PyTorch."""

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


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that were created and still exist, and their peak, with and
    without the tensors of shape `apart`."""

    def __init__(self, apart: torch.Size) -> None:
        super().__init__()
        self.apart, self.known = apart, set()
        self.now = [0, 0]
        self.peak = [0, 0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        for t in tree_leaves(result):
            storage = t.untyped_storage() if isinstance(t, Tensor) else None
            if storage is not None and storage._cdata not in given | self.known:
                size = storage.nbytes()
                self.add(storage._cdata, size, 0 if t.shape == self.apart else size)
                weakref.finalize(
                    storage, self.add, storage._cdata, -size, 0 if t.shape == self.apart else -size
                )
        self.peak = [max(pair) for pair in zip(self.peak, self.now, strict=True)]
        return result

    def add(self, which: int, *sizes: int) -> None:
        self.known ^= {which}
        self.now = [a + b for a, b in zip(self.now, sizes, strict=True)]


class OneRank:
    def size(self) -> int:
        return 1


def sum_without_copies(
    _: Matmul, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Allocate as Matmul.add_weight_gradient does on a GPU. Elsewhere, also on tensors without
    data, that function first copies its operands to `dtype`."""
    return dy.new_empty((dy.shape[1], x.shape[1]), dtype=dtype) if into is None else into


def head_memory(tokens: int, in_pieces: bool) -> list[float]:
    """The peak in GiB, with the weight's gradient dw and without it.

    With whole logits, the peak is three tensors of their size in float32: the logarithms of the
    probabilities, their gradient, and the gradient of the logits. In pieces, it is the logits of
    one piece, dx, and dw in float32, which is rounded when the logits are freed.
    """
    x = torch.empty(tokens, 1, HEAD_D, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(HEAD_V, HEAD_D, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets, scale = (
        torch.empty(tokens, 1, dtype=torch.int64, device="meta"),
        torch.empty((), device="meta"),
    )
    options = {"vocab_size": HEAD_V, "kernels": "triton", "piece_bytes": PIECE_BYTES["cuda"]}
    with (
        mock.patch.object(Matmul, "add_weight_gradient", sum_without_copies),
        Live(weight.shape) as live,
    ):
        if in_pieces:
            given = x, weight, targets, scale, 0, OneRank(), False
            loss = linear_cross_entropy(*given, matmul=Matmul(), **options)
        else:
            loss = F.cross_entropy(F.linear(x.flatten(0, 1), weight).float(), targets.flatten())
        torch.autograd.grad(loss, (x, weight))
    return [peak / 2**30 for peak in live.peak]


def main() -> None:
    counted = apart()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2))
    rows = [
        (f"{name}, {way}", counted[name][i], FUSED[name][i])
        for name in FUSED
        for i, way in enumerate(WAYS)
    ]
    for y, (label, a, b) in enumerate(reversed(rows)):
        left.barh(y + 0.2, a, 0.4, color=APART, label="apart" if y == 0 else None)
        left.barh(y - 0.2, b, 0.4, color=TOGETHER, label="one kernel" if y == 0 else None)
        left.text(max(a, b) + 0.5, y, f"{a:.0f} → {b}", va="center", color=INK, fontsize=8)
        print(f"{label:24} apart {a:5.1f}   one kernel {b:2} bytes per element")
    left.set_yticks(range(len(rows)), [label for label, *_ in reversed(rows)], fontsize=8)
    left.set_xlabel("bytes moved per element, bfloat16")
    left.legend(loc="lower right", fontsize=8, frameon=False)
    tokens = [2**k for k in range(10, 17)]
    (whole, without_dw), (pieces_and_dw, pieces) = (
        zip(*(head_memory(t, in_pieces) for t in tokens), strict=True)
        for in_pieces in (False, True)
    )
    assert whole == without_dw, "the peak of whole logits comes before their dw"
    right.plot(tokens, whole, color=APART, marker="o", label="whole logits")
    right.plot(
        tokens,
        pieces_and_dw,
        color=TOGETHER,
        marker="o",
        linestyle=":",
        label="in pieces, with dw in float32",
    )
    right.plot(tokens, pieces, color=TOGETHER, marker="o", label="in pieces")
    for t, a, b, c in zip(tokens, whole, pieces, pieces_and_dw, strict=True):
        print(
            f"head, {t:6} tokens: {a:6.1f} GiB whole, {b:4.1f} GiB in pieces, {c:4.1f} GiB with dw "
            "in float32"
        )
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    right.set_xlabel(f"tokens of a micro-batch; D {HEAD_D:,}, V {HEAD_V:,}")
    right.set_ylabel("GiB at the peak, beyond input and weight")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    out = IMAGES / "kernels.svg"
    matplotlib.rcParams["svg.hashsalt"] = "lattice"  # the same file every time
    figure.savefig(out, metadata={"Date": None})
    print(f"drew {out.name}")


if __name__ == "__main__":
    main()
