"""Draws the tour's pictures that are computed, into docs/images/: `make docs`, or `python -m
docs.pictures NAME …` for some of them.

    data, memory    what the planner counts
    kernels         bytes, counted while formulas run
    context         the chunks of a sequence that `ContextParallel` gives to each rank
    checkpoints     the shards of one matrix
    pipeline        the simulated schedules of docs/pipeline.md and docs/schedules.md

The other pictures in docs/images/ show ideas, and are edited as SVG.
"""

import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from costs.parameters import num_parameters
from parallel.context import ContextParallel
from parallel.memory import GATHERED, GRADIENTS, MOMENTS, SHARDED_GRADIENTS, WEIGHTS
from parallel.pipeline.schedules import STAGES_PER_RANK
from parallel.placement import chunk_range
from settings.load import load_config
from tools.plan.guide import STAGES, data_parallel, our_bytes
from tools.plan.hardware import GB, find_device
from tools.plan.layout import Layout
from tools.plan.memory import Memory
from tools.plan.traffic import times_a_step
from tools.timeline.draw import INK, draw, save
from tools.timeline.panels import simulated_panels

IMAGES = Path(__file__).parent / "images"
GREEN, LIGHT_GREEN, BLUE = "#15803d", "#86efac", "#1d4ed8"
ORANGE, LIGHT_ORANGE, YELLOW, GREY = "#c2410c", "#fdba74", "#fcd34d", "#9ca3af"
RANKS = ("#1d4ed8", "#60a5fa", "#0f766e", "#5eead4")  # they also differ in lightness
FAINT = "#e5e7eb"


def new_figure(height: float, title: str) -> Figure:
    """A figure 8.4 inches wide; its text is read at half of the size in which it is drawn."""
    figure = Figure((8.4, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=13, weight="bold", color=INK)
    return figure


def legend(figure: Figure, colours: dict[str, str], columns: int) -> None:
    """A legend below all axes: name → colour."""
    boxes = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=boxes, loc="outside lower left", ncols=columns, frameon=False)


def stack(bar: Any, at: float, parts: dict[str, float], colours: dict[str, str]) -> float:
    """Draw parts behind each other by `bar`, Axes.bar or Axes.barh, and return their sum."""
    end = 0.0
    for name, size in parts.items():
        bar(at, size, 0.62, end, color=colours[name], edgecolor="white", linewidth=0.8)
        end += size
    return end


# --- memory that the planner counts ---------------------------------------------------------------

HELD = {  # the planner's category → its name in the picture and its colour
    MOMENTS: ("moments, float32", GREEN),
    WEIGHTS: ("weights, float32", LIGHT_GREEN),
    GATHERED: ("weights to compute with, bfloat16", BLUE),
    GRADIENTS: ("gradients, float32", ORANGE),
    SHARDED_GRADIENTS: ("gradients, reduced", LIGHT_ORANGE),
}
MICRO_BATCHES = 4


def data(ranks: int = 8) -> Figure:
    """Bytes per parameter of configs/llama3_8b.yaml between two micro-batches."""
    batch = f"train.global_batch_size={ranks * MICRO_BATCHES}"
    config = load_config("configs/llama3_8b.yaml", [batch])
    numel, colours = num_parameters(config.model), dict(HELD.values())
    figure = new_figure(3.9, f"What each of {ranks} data-parallel ranks holds per parameter")
    axes = figure.subplots()
    for stage in STAGES:
        held = our_bytes(config, ranks, stage)
        parts = {HELD[category][0]: held[category] / numel for category in HELD}
        end = stack(axes.barh, stage, parts, colours)
        axes.text(end + 0.25, stage, f"{end:.4g}", va="center", weight="bold", color=INK)
        gathers, reductions = times_a_step(data_parallel(config, ranks, stage))
        gathers *= stage > 0  # without shards there is nothing to gather
        words = f"weights gathered {gathers} ×\ngradients reduced {reductions} ×"
        axes.text(20, stage, words, va="center", color=INK)
    axes.text(20, -0.62, f"in a step of {MICRO_BATCHES} micro-batches:", color=INK, style="italic")
    axes.set_yticks(STAGES, [f"zero_stage {stage}" for stage in STAGES])
    axes.set(xlim=(0, 27), ylim=(3.5, -0.85), xticks=range(0, 19, 6))
    axes.set_xlabel("bytes per parameter, without activations", loc="left")
    legend(figure, colours, 2)
    return figure


PEAK = {  # name of a part of the peak → the planner's categories in it, and its colour
    "weights, optimizer, reduced gradients": (
        ("sharded weights", "optimizer state", "sharded gradients"), GREEN),
    "weights to compute with": (("gathered weights", "buffers of gathers"), BLUE),
    "whole gradients": (("whole gradients", "buffers of reductions"), ORANGE),
    "activations": (
        ("activations", "kept for weight gradients", "messages of the pipeline"), YELLOW),
    "temporary": (("temporary",), GREY),
}  # fmt: skip
PLAIN_1F1B = (
    "parallel.tp=8 parallel.pp=4 parallel.schedule=1f1b parallel.stages_per_rank=1 "
    "parallel.tp_pieces=1 train.activation_checkpointing=none"
)


def memory() -> Figure:
    """The peak on each pipeline rank of 70B, and of 8B with less and less kept for backward."""
    large = load_config("configs/llama3_70b.yaml", PLAIN_1F1B.split())
    bars = {f"pp {rank}": Layout(large, 256, rank) for rank in range(large.parallel.pp)}
    for mode in ("none", "selective", "full"):
        small = load_config("configs/llama3_8b.yaml", [f"train.activation_checkpointing={mode}"])
        bars[mode] = Layout(small, 8, 0)
    figure = new_figure(4.4, "Memory at the peak, GB")
    axes, colours = figure.subplots(), {name: colour for name, (_, colour) in PEAK.items()}
    places = [0, 1, 2, 3, 4.6, 5.6, 6.6]
    for at, layout in zip(places, bars.values(), strict=True):
        peak = Memory(layout)
        parts = {
            name: sum(peak.at_peak.get(category, 0) for category in categories) / GB
            for name, (categories, _) in PEAK.items()
        }
        end = stack(axes.bar, at, parts, colours)
        assert abs(end - peak.peak / GB) < 0.01, f"a category is in no part: {peak.at_peak.keys()}"
        label = axes.text(at, end + 1.5, f"{end:.1f}", ha="center", weight="bold", color=INK)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    room = find_device("h100").room / GB
    axes.axhline(room, color=ORANGE, linestyle="--", linewidth=1)
    axes.text(2.0, room + 1.5, "what CUDA and NCCL leave of 80 GB", color=ORANGE, ha="center")
    axes.set_xticks(places, bars)
    axes.text(1.5, -15, "70B, 256 GPUs, 1F1B: rank of the pipeline", ha="center", color=INK)
    axes.text(5.6, -15, "8B, 8 GPUs: recomputation", ha="center", color=INK)
    axes.set(ylim=(0, 88), xlim=(-0.6, 7.2), yticks=range(0, 81, 20))
    legend(figure, colours, 3)
    return figure


# --- bytes that operations move -------------------------------------------------------------------

# Bytes per element in forward and in backward, without the small terms, as the kernels' files state
# them (tests/kernels/test_kernel_bytes.py).
FUSED = {"RMSNorm": (4, 6), "sum + RMSNorm": (8, 8), "rotation": (4, 4), "SwiGLU": (6, 10),
         "cross-entropy": (2, 4)}  # fmt: skip


class Bytes(TorchDispatchMode):
    """Counts the bytes that every operation reads and writes, except views."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}.values()
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        places = {t.untyped_storage().data_ptr() for t in inputs}
        is_view = all(t.untyped_storage().data_ptr() in places for t in outputs)
        if not is_view or func.name().endswith("_"):
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
    """The bytes that a formula in plain PyTorch moves per element of its first input, in forward
    and in backward."""
    with Bytes() as forward:
        y = function(*inputs)
    with Bytes() as backward:
        y.backward(torch.ones_like(y))
    return forward.moved / inputs[0].numel(), backward.moved / inputs[0].numel()


def apart() -> dict[str, tuple[float, float]]:
    """The bytes per element, in forward and in backward, of each operation of FUSED as the papers
    write it, where each PyTorch operation reads its inputs and writes its output."""

    def bf16(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16().requires_grad_()

    x, r, w, angles = bf16(256, 512), bf16(256, 512), bf16(512), bf16(256, 1, 64).detach()
    return {
        "RMSNorm": moved_apart(rms_norm, x, w),
        "sum + RMSNorm": moved_apart(lambda a, b, c: rms_norm(a + b, c), x, r, w),
        "rotation": moved_apart(rotation, bf16(256, 8, 64), angles, angles),
        "SwiGLU": moved_apart(lambda g, u: g * torch.sigmoid(g) * u, x, r),
        "cross-entropy": moved_apart(cross_entropy, bf16(256, 1024)),
    }


def kernels() -> Figure:
    """Bytes moved per element, apart and fused."""
    figure = new_figure(4.0, "Bytes moved per element of an operation")
    axes, counted, names = figure.subplots(), apart(), []
    for name, way in product(FUSED, (0, 1)):
        y, moved, fused = len(names), counted[name][way], FUSED[name][way]
        names.append(f"{name}, {('forward', 'backward')[way]}")
        axes.barh(y - 0.2, moved, 0.4, color=ORANGE)
        axes.barh(y + 0.2, fused, 0.4, color=BLUE)
        axes.text(moved + 1.5, y, f"{moved:.0f} → {fused}", va="center", size=9, color=INK)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="bytes per element, bfloat16", xlim=(0, 120), ylim=(len(names) - 0.5, -0.5))
    legend(figure, {"apart: PyTorch, as the papers write it": ORANGE, "one kernel": BLUE}, 2)
    return figure


# --- a sequence, a matrix, a pipeline -------------------------------------------------------------

CP, POSITIONS = 4, 256


def context() -> Figure:
    """Causal attention as a triangle: a row is a query, a column a key, and the area is work."""
    splits: dict[str, Callable[[int], list[range]]] = {
        "contiguous": lambda rank: [chunk_range(POSITIONS, CP, rank)],
        "zig-zag": lambda rank: ContextParallel(CP, rank).chunks(POSITIONS),
    }
    figure = new_figure(4.3, "Causal attention on four context-parallel ranks")
    for axes, (name, split) in zip(figure.subplots(1, 2), splits.items(), strict=True):
        work = []
        for rank in range(CP):
            chunks, colour = split(rank), RANKS[rank]
            for part in chunks:
                top, bottom = part.start, part.stop
                corners = [(0, top), (top, top), (bottom, bottom), (0, bottom)]
                axes.add_patch(Polygon(corners, color=colour, ec="white"))
                axes.add_patch(Rectangle((-16, top), 12, len(part), color=colour, ec="white"))
                axes.add_patch(Rectangle((top, -16), len(part), 12, color=colour, ec="white"))
            keys = sum(part.stop**2 - part.start**2 for part in chunks)
            work.append(Fraction(keys, POSITIONS**2))
        axes.add_patch(Rectangle((0, 0), POSITIONS, POSITIONS, color=FAINT, zorder=0))
        axes.set_title(
            f"{name}: the last to finish takes {float(max(work) * CP):g} × the mean", size=11
        )
        shares = "\n".join(f"rank {rank}: {share}" for rank, share in enumerate(work))
        axes.text(140, 20, f"share of the work\n{shares}", va="top", color=INK)
        axes.text(POSITIONS / 2, -26, "keys", ha="center", color=INK)
        axes.text(-26, POSITIONS / 2, "queries", va="center", ha="right", rotation=90, color=INK)
        axes.set(xlim=(-40, POSITIONS + 2), ylim=(POSITIONS + 2, -44), aspect="equal")
        axes.axis("off")
    colours = {f"cp rank {rank}": colour for rank, colour in enumerate(RANKS)}
    legend(figure, colours | {"later than the query: not seen": FAINT}, 5)
    return figure


def shards(shape: tuple[int, int], dp_shard: int, tp: int) -> list[tuple[int, int, int, int]]:
    """x, y, width and height of what each rank has of a matrix: FSDP shards rows, tp columns."""
    of = product(range(dp_shard), range(tp))
    each = [(chunk_range(shape[1], tp, t), chunk_range(shape[0], dp_shard, d)) for d, t in of]
    return [(across.start, down.start, len(across), len(down)) for across, down in each]


def checkpoints() -> Figure:
    """One matrix of configs/laptop.yaml, saved by ranks of (dp_shard, tp) and loaded by others."""
    model = load_config("configs/laptop.yaml", []).model
    shape, saved_by = (model.dim, model.ffn_dim), (2, 2)
    figure = new_figure(2.7, "A checkpoint stores global tensors: any layout loads what any saved")
    ways = {"saved": saved_by, "loaded": (3, 1)}
    for axes, (verb, layout) in zip(figure.subplots(1, 2), ways.items(), strict=True):
        for colour, (x, y, *size) in zip(RANKS, shards(shape, *saved_by), strict=True):
            axes.add_patch(Rectangle((x, y), *size, color=colour, ec="white"))
        for rank, (x, y, width, height) in enumerate(shards(shape, *layout)):
            axes.add_patch(Rectangle((x, y), width, height, fill=False, ec=INK, lw=2))
            at = x + width / 2, y + height / 2
            label = axes.text(*at, f"rank {rank}", ha="center", va="center", color="white")
            label.set_bbox({"facecolor": INK, "edgecolor": "none", "boxstyle": "round"})
        words = f"{shape[0]} × {shape[1]}, {verb} by dp_shard {layout[0]} × tp {layout[1]}"
        axes.set_title(words, size=11)
        axes.set(xlim=(-2, shape[1] + 2), ylim=(shape[0] + 2, -2), aspect="equal")
        axes.axis("off")
    legend(figure, {f"file of rank {rank}": colour for rank, colour in enumerate(RANKS)}, 4)
    return figure


PIPELINES = {  # name → schedules
    "gpipe": ("gpipe", "1f1b"),
    "smaller_stages": ("interleaved_1f1b", "breadth_first"),
    "zero_bubble": ("zb_h1",),
    "v": ("zb_v", "dualpipe_v"),
}


def pipelines() -> dict[str, Figure]:
    """Four ranks and eight micro-batches. The unit of time is a forward of all of a rank's layers;
    I and W take as long. All axes have one length, so that they can be compared."""
    panels = {}
    for name, schedules in PIPELINES.items():
        stages = [STAGES_PER_RANK.get(schedule, 2) for schedule in schedules]
        panels[name] = simulated_panels(schedules, 4, 8, stages, (1 / max(stages),) * 3)
    span = max(panel.timeline.step_time for found in panels.values() for panel in found)
    unit = "in forwards of all of a rank's layers"
    return {f"pipeline_{name}": draw(found, unit, span) for name, found in panels.items()}


ONE_EACH = {of.__name__: of for of in (data, memory, kernels, context, checkpoints)}
NAMES = (*ONE_EACH, "pipeline")


def pictures(names: Sequence[str]) -> dict[str, Figure]:
    """Name of the file → picture."""
    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        found = {name: ONE_EACH[name]() for name in names if name != "pipeline"}
        return found | (pipelines() if "pipeline" in names else {})


if __name__ == "__main__":
    for name, figure in pictures(sys.argv[1:] or NAMES).items():
        save(figure, IMAGES / f"{name}.svg")
        print(f"wrote docs/images/{name}.svg")
