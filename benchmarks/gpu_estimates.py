"""Every estimate that one GPU can confirm or refute, with its source; no other file has them. Also
those that it cannot, with the reason.

An estimate names the row that measures it and the number in that row (dots lead into tables):
gpu_page.py looks them up. It holds between `least` and `most`. An MFU is a fraction of the device's
dense bfloat16 peak; estimates of speed are for one H200, and on another device their verdict
does not count.
"""

from dataclasses import dataclass

RIGHT, FAST, OPEN = "right", "fast", "open"
# The aims of docs/kernels.md: MFU at the 8-billion width; the rate of a kernel that is bound by
# memory, over that of a copy; the head over its three products, and over eager PyTorch's memory.
MFU_AIM, BANDWIDTH_AIM, PRODUCTS_AIM, MEMORY_AIM = 0.62, 0.85, 1.1, 1 / 8
MFU_SELECTIVE = 0.575  # the middle of the estimate below
INFINITY = float("inf")


@dataclass(frozen=True)
class Estimate:
    """One estimate. `row` is the end of the measuring row's name; without one, `why_not` says why
    nothing here measures it."""

    part: str
    what: str
    least: float
    most: float
    source: str
    row: str = ""
    number: str = ""
    device: str = ""  # a part of the device's name for which it was made; empty: any device
    why_not: str = ""


PATHS = "review of the GPU paths against torch 2.13's source; nothing was run"
DOCS_KERNELS = "docs/kernels.md, the aims"
HARDWARE = "hardware.py, fitted to five published runs on H100"
ACCURACY = "docs/plan_accuracy.md"
H200 = "H200"
LONG = "8B width, lattice, triton, selective checkpointing"
MEMORY = ("", ", selective checkpointing", ", full checkpointing", ", bfloat16", ", zero_stage 0",
          ", zero_stage 3")  # fmt: skip
BOUND_BY_MEMORY = [
    *((kernel, way) for kernel in ("rms_norm 4096", "add_rms_norm 4096", "rotary", "swiglu 14336",
                                   "cross_entropy") for way in ("forward", "backward")),
    *((kernel, "step") for kernel in ("gradient_norm", "adamw float32", "adamw bfloat16")),
]  # fmt: skip


def of_memory() -> list[Estimate]:
    models = [f"8B width, lattice, triton{mode}" for mode in MEMORY]
    models += [f"1B, lattice, triton{mode}" for mode in MEMORY[:2]]
    return [
        Estimate(RIGHT, f"peak memory over the {name}, {model}", 0.97, 1.03, ACCURACY,
                 f"memory, {model}", f"over_{name}")
        for model in models
        for name in ("planned", "rehearsed")
    ]  # fmt: skip


ESTIMATES = [
    *of_memory(),
    # --- fast ---
    *(
        Estimate(FAST, f"{kernel}, {way}: fraction of a copy's rate", BANDWIDTH_AIM, INFINITY,
                 DOCS_KERNELS, f"{kernel}, {way}, triton", "fraction_of_copy")
        for kernel, way in BOUND_BY_MEMORY
    ),
    Estimate(FAST, "head with its loss over its three products", 0, PRODUCTS_AIM, DOCS_KERNELS,
             "linear_cross_entropy, forward + backward, triton", "aims.over_three_products.found"),
    Estimate(FAST, "head's memory over that of eager PyTorch", 0, MEMORY_AIM, DOCS_KERNELS,
             "linear_cross_entropy, forward + backward, triton", "aims.memory_over_eager.found"),
    Estimate(FAST, "large matrix product: fraction of the peak", 0.75, 0.85, HARDWARE, "product",
             "fraction_of_peak"),
    Estimate(FAST, "MFU, 8B width, selective, 16 micro-batches", 0.57, 0.58, PATHS,
             f"{LONG}, long step", "mfu", H200),
    Estimate(FAST, "MFU, 8B width, full recomputation, 16 micro-batches", 0.46, 0.484,
             PATHS + "; 2.4 points more once the last product is not recomputed",
             "8B width, lattice, triton, full checkpointing, long step", "mfu", H200),
    Estimate(FAST, "MFU, 8B width, the best of ours", MFU_AIM, INFINITY, DOCS_KERNELS,
             "best of ours at 8B width", "mfu"),
    Estimate(FAST, "step over the planned step, 8B width, selective", 0.9, 1.1, ACCURACY,
             f"{LONG}, long step", "over_planned"),
    Estimate(FAST, "step over the planned step, 1B", 0.75, 1.25, ACCURACY, "1B, lattice, triton",
             "over_planned"),
    Estimate(FAST, "share of a step in which the GPU is idle", 0, 0.01, PATHS,
             "profile, 8B width, lattice, triton, selective checkpointing", "idle_share"),
    # --- open ---
    Estimate(OPEN, "MFU, 8B width, selective, cuDNN's attention", 0.57, 0.58, PATHS,
             f"{LONG}, cudnn, long step", "mfu", H200),
    Estimate(OPEN, "MFU, 8B width, selective, flash attention 2", 0.515, 0.525, PATHS,
             f"{LONG}, flash2, long step", "mfu", H200),
    Estimate(OPEN, "MFU, 8B width, selective, flash attention 3", 0.57, 0.60, PATHS,
             f"{LONG}, flash3, long step", "mfu", H200),
    Estimate(OPEN, "attention: fraction of the peak, our choice", 0.27, 0.60,
             HARDWARE + " (0.27, everything included)", "attention, auto", "fraction_of_peak"),
    Estimate(OPEN, "points of MFU that FSDP costs over one rank", 0.3, 4.5, PATHS,
             "what FSDP adds over one rank", "points", H200),
    Estimate(OPEN, "points of MFU of weight gradients summed in the product", 0.75, 1.5,
             PATHS + "; 1.5 of the whole step, of which this is the products' part",
             "weight gradients of a block", "points", H200),
    Estimate(OPEN, "traffic hidden behind products, high priority", 0.9, 1.0, PATHS,
             "overlap, default connections, high priority", "hidden"),
    Estimate(OPEN, "the same, one hardware queue", 0.9, 1.0, PATHS,
             "overlap, 1 connections, high priority", "hidden"),
    Estimate(OPEN, "the same, normal priority: not hidden", 0.0, 0.5, PATHS,
             "overlap, default connections, normal priority", "hidden"),
    Estimate(OPEN, "MFU, 70B on 256 H100", 0.39, 0.41, PATHS, why_not="needs 256 GPUs"),
    Estimate(OPEN, "points of MFU by overlapping tensor parallelism in forward, 70B", 4, 4, PATHS,
             why_not="needs 8 GPUs"),
    Estimate(OPEN, "points of MFU by NCCL's streams of high priority, 70B", 0, 4, PATHS,
             why_not="needs several GPUs; the rows `overlap` show the mechanism on one"),
    Estimate(OPEN, "points of MFU by fewer, larger products for q, k, v and gate, up, 8B", 0.4, 0.4,
             PATHS, why_not="the model does not have them"),
]  # fmt: skip
