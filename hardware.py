"""Rates of accelerators: what their makers' data sheets state, and what part of it programs reach.
No other file has such numbers.

Asked by MFU (runtime/metrics.py), the warning about slow links (runtime/topology.py), the balance
of pipeline stages (costs/summary.py) and the planner (tools/plan/).
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """One accelerator of a cluster, and its part of the network."""

    name: str  # in lower case, a part of torch.cuda.get_device_name()
    peak_flops: float  # a second, dense, bfloat16
    peak_flops_float32: float  # in float32 itself: nothing switches TF32 on
    peak_flops_float64: float
    # as torch.cuda.get_device_properties(0).total_memory says; labels are rounder
    memory_bytes: float
    memory_bytes_per_second: float
    node_bytes_per_second: float  # from one GPU to the others of its node, one direction
    network_bytes_per_second: float  # from one GPU to other nodes, one direction
    watts: float


# NVIDIA's and AMD's data sheets (float64 and float32 on tensor or matrix cores where there are
# such, without TF32); memory as torch reports it: 81,089 MiB on H100 80GB HBM3, 79.2 GiB on A100
# 80GB, 139.8 GiB on H200, 178.35 GiB on B200 (MI300X: the label's 192 GB); the usual networks: 200
# Gb/s beside A100, 400 Gb/s beside H100 and MI300X, 800 Gb/s beside B200.
DATA_SHEETS = {
    sheet.name: sheet
    for sheet in (
        DataSheet(
            name="a100", peak_flops=312e12, peak_flops_float32=19.5e12, peak_flops_float64=19.5e12,
            memory_bytes=85.0e9, memory_bytes_per_second=2.04e12, node_bytes_per_second=300e9,
            network_bytes_per_second=25e9, watts=400,
        ),
        DataSheet(
            name="h100", peak_flops=989e12, peak_flops_float32=67e12, peak_flops_float64=67e12,
            memory_bytes=85.0e9, memory_bytes_per_second=3.35e12, node_bytes_per_second=450e9,
            network_bytes_per_second=50e9, watts=700,
        ),
        DataSheet(
            name="h200", peak_flops=989e12, peak_flops_float32=67e12, peak_flops_float64=67e12,
            memory_bytes=150.1e9, memory_bytes_per_second=4.8e12, node_bytes_per_second=450e9,
            network_bytes_per_second=50e9, watts=700,
        ),
        DataSheet(
            name="b200", peak_flops=2250e12, peak_flops_float32=75e12, peak_flops_float64=37e12,
            memory_bytes=191.5e9, memory_bytes_per_second=7.7e12, node_bytes_per_second=900e9,
            network_bytes_per_second=100e9, watts=1000,
        ),
        DataSheet(
            name="mi300x", peak_flops=1307e12,
            peak_flops_float32=163.4e12, peak_flops_float64=163.4e12, memory_bytes=192e9,
            memory_bytes_per_second=5.3e12, node_bytes_per_second=448e9,
            network_bytes_per_second=50e9, watts=750,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Device(DataSheet):
    """One GPU of a cluster, and its part of the network.

    The rates are the manufacturer's. The efficiencies are of a program without
    special cases: they hold for all models and layouts. They were fitted to five runs on H100
    (benchmarks/plan_megatron.py) and are the same for other devices, but for A100;
    benchmarks/plan_published.py shows what they are worth elsewhere. A JSON file of measured rates
    may replace any.
    """

    gpus_per_node: int = 8
    reserved_bytes: float = 8e9  # context, NCCL's buffers, fragmentation: what a run cannot have
    efficiencies_of: str = "h100"  # on which those below were found
    matmul_efficiency: float = 0.75  # of large products
    # a product takes as long as if its inner dimension were this much longer
    matmul_ramp: int = 160
    attention_efficiency: float = 0.27
    memory_efficiency: float = 0.45
    node_efficiency: float = 0.8
    network_efficiency: float = 0.85
    kernel_seconds: float = 10e-6  # beginning and end of one kernel
    collective_seconds: float = 12e-6  # of one collective inside a node
    # from node to node in a ring or tree: NCCL's own figure for its Simple protocol
    hop_seconds: float = 14e-6
    step_seconds: float = 0.02  # of a step besides: the host, ranks that wait for each other

    def peak(self, width: int) -> float:
        """Products a second, times two, of numbers of `width` bytes."""
        return {2: self.peak_flops, 4: self.peak_flops_float32, 8: self.peak_flops_float64}[width]


# Products and attention reach more of A100's peaks than of H100's, copies less. In the same
# measurement on both, A100 first: products 85.9% and 80.1% ("maximum achievable matmul FLOPS",
# github.com/stas00/ml-engineering, compute/accelerator); flash attention 2, over heads of 64 and
# 128, 57.5% and 33.2%, copies 78.9% and 86.6% (github.com/Azure/AI-benchmarking-guide,
# Azure_Results). A100's efficiencies are those of H100 times these quotients; no run on A100 was
# fitted.
EFFICIENCIES: dict[str, dict[str, Any]] = {
    "a100": {"efficiencies_of": "a100", "matmul_efficiency": 0.80, "attention_efficiency": 0.47,
             "memory_efficiency": 0.41},
    "h100": {},
    "h200": {},
    "b200": {},
}  # fmt: skip
DEVICES = {
    name: Device(**asdict(DATA_SHEETS[name]), **found) for name, found in EFFICIENCIES.items()
}
H100 = DEVICES["h100"]  # what is taken where no device is at hand


def data_sheet_of(device_name: str) -> DataSheet | None:
    """Of a device by torch's name for it; None where it is not listed."""
    return next((sheet for name, sheet in DATA_SHEETS.items() if name in device_name.lower()), None)
