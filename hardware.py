"""Rates of accelerators: the figures of their data sheets, the fractions that programs reach, and
how often they fail. No other file has such numbers.

Used for MFU (runtime/metrics/metrics.py), the times of transfers (costs/seconds.py),
the balance of pipeline stages (costs/summary.py), the planner (tools/plan/), and for how often to
save (runtime/checkpoint/save_interval.py).
"""

import re
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DataSheet:
    """The data sheet of one accelerator, and its share of the node's and the cluster's network."""

    name: str  # in lower case, whole words of torch.cuda.get_device_name()
    peak_flops: float  # per second, dense, bfloat16
    peak_flops_float32: float  # without TF32, which is never switched on
    peak_flops_float64: float
    # as in torch.cuda.get_device_properties(0).total_memory; the advertised size is rounded
    memory_bytes: float
    memory_bytes_per_second: float
    node_bytes_per_second: float  # from one GPU to the others of its node, one direction
    network_bytes_per_second: float  # from one GPU to other nodes, one direction
    multiprocessors: int  # AMD: compute units
    watts: float


# Sources: NVIDIA's and AMD's data sheets (float64 and float32 on tensor or matrix cores where they
# exist, without TF32). Memory as torch reports it: 81,089 MiB on H100 80GB HBM3, 79.2 GiB on A100
# 80GB, 139.8 GiB on H200, 178.35 GiB on B200 (MI300X, H100 NVL: the advertised size). Usual
# networks: 200 Gb/s for A100, 400 Gb/s for H100 and MI300X, 800 Gb/s for B200. Cards without a
# switch between all of a node's GPUs (PCIe, NVL) have PCIe 5.0's rate inside a node.
# Multiprocessors: NVIDIA's whitepapers on A100 and H100, AMD's on CDNA 3; for B200, what a query of
# the device returned (github.com/pytorch/ao, pull request 4002).
DATA_SHEETS = {
    sheet.name: sheet
    for sheet in (  # columns in the order of the fields above
        DataSheet("a100", 312e12, 19.5e12, 19.5e12, 85.0e9, 2.04e12, 300e9, 25e9, 108, 400),
        DataSheet("h100", 989e12, 67e12, 67e12, 85.0e9, 3.35e12, 450e9, 50e9, 132, 700),
        DataSheet("h100 pcie", 756e12, 51e12, 51e12, 85.0e9, 2.0e12, 64e9, 50e9, 114, 350),
        DataSheet("h100 nvl", 835e12, 60e12, 60e12, 100e9, 3.9e12, 64e9, 50e9, 132, 400),
        DataSheet("h200 nvl", 835e12, 60e12, 60e12, 150.1e9, 4.8e12, 64e9, 50e9, 132, 600),
        DataSheet("h200", 989e12, 67e12, 67e12, 150.1e9, 4.8e12, 450e9, 50e9, 132, 700),
        DataSheet("b200", 2250e12, 75e12, 37e12, 191.5e9, 7.7e12, 900e9, 100e9, 148, 1000),
        DataSheet("mi300x", 1307e12, 163.4e12, 163.4e12, 192e9, 5.3e12, 448e9, 50e9, 304, 750),
    )
}


# Interruptions of a job by failures, for each GPU and day. Llama 3's 405B (section 3.3.4,
# https://arxiv.org/abs/2407.21783): 419 unplanned ones in 54 days on 16,384 H100, one in 2,112
# GPU-days. Meta's research clusters with A100 fail 1.7 times as often: their fitted model gives a
# mean time to failure of 1.8 h for the same number of GPUs (https://arxiv.org/abs/2410.21680).
FAILURES_PER_GPU_DAY = 419 / (16_384 * 54)
# The share of them after which a node is missing, until it is repaired: those attributed to
# hardware, about 78% (the same section).
NODE_LOST_SHARE = 0.78


@dataclass(frozen=True, kw_only=True)
class Device(DataSheet):
    """One GPU of a cluster as the planner models it: its data sheet, and what programs reach of it.

    The rates are the manufacturer's. The efficiencies are the same for all models and layouts. They
    were fitted to five runs on H100 (benchmarks/published/fitted.yaml) and are used for all other
    devices except A100; benchmarks/plan_accuracy.py shows how accurate they are elsewhere. A JSON
    file of measured rates may replace any of them.
    """

    gpus_per_node: int = 8
    reserved_bytes: float = 8e9  # not available to a run: context, NCCL's buffers, fragmentation
    efficiencies_of: str = "h100"  # the device for which the efficiencies below were determined
    matmul_efficiency: float = 0.66  # of matrix products that fill all multiprocessors
    attention_efficiency: float = 0.27
    memory_efficiency: float = 0.45
    node_efficiency: float = 0.8
    network_efficiency: float = 0.85
    # rows and columns of the part of a matrix product's result that one multiprocessor computes
    tile: int = 128
    kernel_seconds: float = 10e-6  # overhead at the beginning and end of one kernel
    collective_seconds: float = 12e-6  # latency of one collective inside a node
    # latency from node to node in a ring or tree: NCCL's own figure for its Simple protocol
    hop_seconds: float = 14e-6
    # the device idles while the host, which has waited for it, launches the next kernels: estimated
    # as a copy to the host, some twenty operations of Python, and a launch; not measured
    host_wait_seconds: float = 100e-6
    step_seconds: float = 0.02  # overhead per step: the host, ranks that wait for each other
    # With parallel.offload, assumed and not fitted: what the optimizer reads and writes of one
    # node's memory, and what one node reads and writes of its local disk (tools.preflight measures
    # it), each by all ranks at once.
    host_memory_bytes_per_second: float = 100e9
    disk_bytes_per_second: float = 3e9
    # Saving and restarting, assumed and not fitted; tools.report says what they took in a run.
    # between one GPU and its host's memory, all GPUs at once; of what is offloaded too
    host_bytes_per_second: float = 10e9
    storage_bytes_per_second: float = 1e9  # from one node to the shared storage, all at once
    restart_seconds: float = 300.0  # from a failure to the first new step
    repair_days: float = 1.0  # until a node that was lost can be used again

    @property
    def room(self) -> float:
        """Bytes that a run's tensors may take."""
        return self.memory_bytes - self.reserved_bytes

    def gpus_of_node(self, world: int) -> int:
        """How many GPUs of a job of `world` share a node."""
        return min(self.gpus_per_node, world)

    def peak(self, width: int) -> float:
        """The peak for numbers of `width` bytes, in FLOP/s (two per multiply-add)."""
        return {2: self.peak_flops, 4: self.peak_flops_float32, 8: self.peak_flops_float64}[width]


# On A100, matrix products and attention reach a larger fraction of the peak than on H100, and
# copies a smaller one. The same measurements on A100 and H100: matrix products 85.9% and 80.1%
# ("maximum achievable matmul FLOPS", github.com/stas00/ml-engineering, compute/accelerator); flash
# attention 2, over heads of 64 and 128, 57.5% and 33.2%; copies 78.9% and 86.6%
# (github.com/Azure/AI-benchmarking-guide, Azure_Results). A100's efficiencies are those of H100
# times these quotients; no run on A100 was fitted.
OF_A100 = {"efficiencies_of": "a100", "matmul_efficiency": 0.71, "attention_efficiency": 0.47,
           "memory_efficiency": 0.41}  # fmt: skip
EFFICIENCIES: dict[str, dict[str, Any]] = {"a100": OF_A100, "h100": {}, "h200": {}, "b200": {}}
DEVICES = {
    name: Device(**asdict(DATA_SHEETS[name]), **found) for name, found in EFFICIENCIES.items()
}
H100 = DEVICES["h100"]  # the default where the device is not known


def data_sheet_of(device_name: str) -> DataSheet | None:
    """Return the data sheet of a device by torch's name for it; None if it is not listed. "NVIDIA
    H100 PCIe" is not an "h100", whose peak is a third higher: the longest name that fits counts.
    Nor is "NVIDIA RTX A1000" an "a100": names are whole words. GH200's GPU has H200's rates."""
    said = device_name.lower().replace("gh200", "h200")
    names = [name for name in DATA_SHEETS if re.search(rf"\b{name}\b", said)]
    return DATA_SHEETS[max(names, key=len)] if names else None
