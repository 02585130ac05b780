"""Draws docs/images/data.svg: bytes per parameter under each `zero_stage`, on eight data-parallel
ranks, and how often weights and gradients are sent. `python -m docs.draw_data`

The planner computes the bytes for configs/llama3_8b.yaml: what a rank holds between two
micro-batches.
"""

from docs import svg
from docs.svg import INK, MUTED, PAPER, line, rectangle, text
from model.transformer import num_parameters
from parallel.memory import GATHERED, GRADIENTS, MOMENTS, SHARDED_GRADIENTS, WEIGHTS
from settings.load import load_config
from tools.plan.guide import STAGES, our_bytes

RANKS, MICRO_BATCHES = 8, 4
WIDTH, HEIGHT = 960, 440
LEFT, TOP, ROW, UNIT = 150, 122, 58, 26  # UNIT: pixels per byte
LOOKS = {  # category → colour, name
    MOMENTS: ("#15803d", "moments, float32"),
    WEIGHTS: ("#86efac", "weights, float32"),
    GATHERED: ("#1d4ed8", "weights to compute with, bfloat16"),
    GRADIENTS: ("#c2410c", "gradients, float32"),
    SHARDED_GRADIENTS: ("#fdba74", "gradients, reduced"),
}


def travels(stage: int) -> tuple[int, int]:
    """How often weights are gathered and gradients reduced in a step, as in the table of
    parallel/data.py."""
    return {0: (0, 1), 1: (1, 1), 2: (1, MICRO_BATCHES), 3: (2 * MICRO_BATCHES, MICRO_BATCHES)}[
        stage
    ]


def draw() -> str:
    config = load_config("configs/llama3_8b.yaml", [])
    numel = num_parameters(config.model)
    parts = [
        text(
            24,
            38,
            f"zero_stage: what each of {RANKS} data-parallel ranks holds per parameter",
            20,
            weight=700,
        ),
        text(24, 62, "bytes between two micro-batches, without activations", 14, MUTED),
        text(660, TOP - 16, f"in a step of {MICRO_BATCHES} micro-batches", 13, MUTED),
    ]
    for stage in STAGES:
        y = TOP + ROW * stage
        x = float(LEFT)
        parts.append(text(24, y + 24, f"zero_stage {stage}", 15, weight=600))
        held = our_bytes(config, RANKS, stage)
        for category, (colour, _) in LOOKS.items():
            width = held[category] / numel * UNIT
            if width:
                parts.append(rectangle(x, y, width, 36, colour, PAPER))
                x += width
        parts.append(text(x + 8, y + 24, f"{sum(held.values()) / numel:.4g}", 15, weight=700))
        gathers, reductions = travels(stage)
        words = f"weights gathered {gathers} ×, gradients reduced {reductions} ×"
        parts.append(text(660, y + 24, words, 13, INK))
    bottom = TOP + ROW * len(STAGES)
    parts.append(line(LEFT, bottom, LEFT + 18 * UNIT, bottom, MUTED))
    for size in range(0, 19, 6):
        parts.append(line(LEFT + size * UNIT, bottom, LEFT + size * UNIT, bottom + 5, MUTED))
        parts.append(text(LEFT + size * UNIT, bottom + 20, f"{size}", 12, MUTED, "middle"))
    for i, (colour, name) in enumerate(LOOKS.values()):
        x, y = 24 + 300 * (i % 3), HEIGHT - 56 + 26 * (i // 3)
        parts += [rectangle(x, y, 16, 16, colour), text(x + 24, y + 13, name, 13)]
    return svg.picture("Bytes per parameter under each ZeRO stage", WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    svg.save("data", draw)
