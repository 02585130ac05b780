"""Draws docs/images/memory.svg: what the planner counts at the peak of memory. `python -m
docs.draw_memory`

Left: configs/llama3_70b.yaml with tp 8, four pipeline ranks, 1F1B and no recomputation. Right:
configs/llama3_8b.yaml, with less and less kept for backward. Prints the same numbers as text.
"""

from docs import svg
from docs.svg import INK, MUTED, PAPER, line, rectangle, text
from parallel.pipeline.actions import Action
from settings.load import load_config
from tools.plan.hardware import GB, find_device
from tools.plan.layout import Layout
from tools.plan.memory import Memory

WIDTH, HEIGHT = 960, 470
GPU = find_device("h100")  # of 80 GB
ROOM = GPU.room  # for tensors
ROOM_SAID = (
    f"each rank has its peak at a different moment; dashed: {ROOM / GB:.0f} GB, what CUDA and NCCL "
    "leave of a GPU of 80 GB"
)
PIPELINE = (
    "parallel.tp=8 parallel.pp=4 parallel.schedule=1f1b parallel.stages_per_rank=1 "
    "parallel.tp_pieces=1 train.activation_checkpointing=none"
)
TOP, BOTTOM, HIGHEST = 100, 350, 86e9  # pixels; bytes of the whole height
GROUPS = {  # name of a box → its colour, and the planner's categories in it
    "weights, optimizer, reduced gradients": (
        "#15803d",
        ("sharded weights", "optimizer state", "sharded gradients"),
    ),
    "weights to compute with": ("#1d4ed8", ("gathered weights", "buffers of gathers")),
    "whole gradients": ("#c2410c", ("whole gradients", "buffers of reductions")),
    "activations": (
        "#fcd34d",
        ("activations", "kept for weight gradients", "messages of the pipeline"),
    ),
    "temporary": ("#9ca3af", ("temporary",)),
}


def groups(memory: Memory) -> dict[str, float]:
    """The bytes at the peak, by group."""
    known = [category for _, categories in GROUPS.values() for category in categories]
    assert set(memory.at_peak) <= set(known), memory.at_peak.keys()
    return {
        name: sum(memory.at_peak.get(c, 0) for c in categories)
        for name, (_, categories) in GROUPS.items()
    }


def bars() -> list[tuple[str, str, Memory]]:
    """(Title of the group of bars, name of the bar, the planner's result) of each bar."""
    large = load_config("configs/llama3_70b.yaml", PIPELINE.split())
    found = [
        ("70B, 256 GPUs, 1F1B: rank of the pipeline", f"pp {r}", Memory(Layout(large, 256, r)))
        for r in range(large.parallel.pp)
    ]
    for mode in ("none", "selective", "full"):
        small = load_config("configs/llama3_8b.yaml", [f"train.activation_checkpointing={mode}"])
        found.append(("8B, 8 GPUs: activation_checkpointing", mode, Memory(Layout(small, 8, 0))))
    return found


def draw() -> str:
    scale = (BOTTOM - TOP) / HIGHEST
    parts = [
        text(24, 38, "Memory at the peak, GB", 20, weight=700),
        text(24, 62, ROOM_SAID, 14, MUTED),
        line(70, BOTTOM - ROOM * scale, WIDTH - 30, BOTTOM - ROOM * scale, svg.PP, 1.5, "6 4"),
        line(70, BOTTOM, WIDTH - 30, BOTTOM, MUTED),
    ]
    for gigabytes in range(0, 81, 20):
        parts.append(
            text(58, BOTTOM - gigabytes * GB * scale + 5, f"{gigabytes}", 13, MUTED, "end")
        )
    titles: dict[str, list[float]] = {}
    for i, (title, name, memory) in enumerate(bars()):
        x = 96 + 112 * i + (50 if title.startswith("8B") else 0)
        titles.setdefault(title, []).append(x + 35)
        y = float(BOTTOM)
        for group, size in groups(memory).items():
            y -= size * scale
            if size:
                parts.append(rectangle(x, y, 70, size * scale, GROUPS[group][0], PAPER))
        parts.append(text(x + 35, y - 8, f"{memory.peak / GB:.1f}", 15, INK, "middle", 700))
        parts.append(text(x + 35, BOTTOM + 20, name, 13, INK, "middle"))
    for title, places in titles.items():
        parts.append(text(sum(places) / len(places), BOTTOM + 44, title, 14, INK, "middle", 600))
    for i, (group, (colour, _)) in enumerate(GROUPS.items()):
        x, y = 24 + 320 * (i % 3), HEIGHT - 54 + 26 * (i // 3)
        parts += [rectangle(x, y, 16, 16, colour), text(x + 24, y + 13, group, 13)]
    return svg.picture("What each rank holds at the peak of memory", WIDTH, HEIGHT, parts)


def describe(action: Action | None) -> str:
    return "after the last action" if action is None else str(action)


if __name__ == "__main__":
    for title, name, memory in bars():
        parts = ", ".join(
            f"{group} {size / GB:.1f}"
            for group, size in groups(memory).items()
            if size >= 0.05 * GB
        )
        print(
            f"{title.split(',')[0]} {name:9} {memory.peak / GB:5.1f} GB in "
            f"{describe(memory.peak_action)}: {parts}"
        )
    svg.save("memory", draw)
