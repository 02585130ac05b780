"""Rates of accelerators, as their makers' data sheets state them: no other file has such numbers.

Asked by MFU (runtime/metrics.py), the warning about slow links (runtime/topology.py), the balance
of pipeline stages (costs/summary.py) and the planner (tools/plan/hardware.py), which adds what part
of a rate programs reach.
"""

from dataclasses import dataclass


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
H100 = DATA_SHEETS["h100"]  # what is taken where no device is at hand


def data_sheet_of(device_name: str) -> DataSheet | None:
    """Of a device by torch's name for it; None where it is not listed."""
    return next((sheet for name, sheet in DATA_SHEETS.items() if name in device_name.lower()), None)
