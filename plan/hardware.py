"""Rates of devices: what data sheets say, and what part of it programs reach."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import UserError

GB = 1e9


@dataclass(frozen=True)
class Device:
    """One GPU of a cluster, and its part of the network.

    The rates are the manufacturer's. The efficiencies are of a program without special cases: they hold for all models and
    layouts. They were fitted to five runs on H100 (benchmarks/plan_megatron.py) and are the same for other devices, but for
    A100; benchmarks/plan_published.py shows what they are worth elsewhere. A JSON file of measured rates may replace any.
    """

    name: str
    peak_flops: float  # a second, dense, bfloat16
    peak_flops_float32: float  # in float32 itself: nothing switches TF32 on
    peak_flops_float64: float
    memory_bytes: float  # as torch.cuda.get_device_properties(0).total_memory says; labels are rounder
    memory_bytes_per_second: float
    node_bytes_per_second: float  # from one GPU to the others of its node, one direction
    network_bytes_per_second: float  # from one GPU to other nodes, one direction
    watts: float
    gpus_per_node: int = 8
    reserved_bytes: float = 8e9  # context, NCCL's buffers, fragmentation: what a run cannot have
    efficiencies_of: str = "h100"  # on which those below were found
    matmul_efficiency: float = 0.71  # of large products
    matmul_ramp: int = 160  # a product takes as long as if its inner dimension were this much longer
    attention_efficiency: float = 0.3
    memory_efficiency: float = 0.42
    node_efficiency: float = 0.8
    network_efficiency: float = 0.85
    kernel_seconds: float = 10e-6  # beginning and end of one kernel
    collective_seconds: float = 12e-6  # of one collective inside a node
    hop_seconds: float = 14e-6  # from node to node in a ring or tree: NCCL's own figure for its Simple protocol
    step_seconds: float = 0.02  # of a step besides: the host, ranks that wait for each other

    def peak(self, width: int) -> float:
        """Products a second, times two, of numbers of `width` bytes."""
        return {2: self.peak_flops, 4: self.peak_flops_float32, 8: self.peak_flops_float64}[width]


# NVIDIA's data sheets (float64 and float32 on Tensor Cores where there are such, without TF32); memory as torch reports it:
# 81,089 MiB on H100 80GB HBM3, 79.2 GiB on A100 80GB, 139.8 GiB on H200, 178.35 GiB on B200; the usual networks: 200 Gb/s
# beside A100, 400 Gb/s beside H100, 800 Gb/s beside B200.
# Products and attention reach more of A100's peaks than of H100's, copies less. In the same measurement on both, A100 first:
# products 85.9% and 80.1% ("maximum achievable matmul FLOPS", github.com/stas00/ml-engineering, compute/accelerator); flash
# attention 2, over heads of 64 and 128, 57.5% and 33.2%, copies 78.9% and 86.6% (github.com/Azure/AI-benchmarking-guide,
# Azure_Results). A100's efficiencies are those of H100 times these quotients; no run on A100 was fitted.
DEVICES = {
    "a100": Device(
        "a100", 312e12, 19.5e12, 19.5e12, 85.0e9, 2.04e12, 300e9, 25e9, 400,
        efficiencies_of="a100", matmul_efficiency=0.76, attention_efficiency=0.52, memory_efficiency=0.38,
    ),
    "h100": Device("h100", 989e12, 67e12, 67e12, 85.0e9, 3.35e12, 450e9, 50e9, 700),
    "h200": Device("h200", 989e12, 67e12, 67e12, 150.1e9, 4.8e12, 450e9, 50e9, 700),
    "b200": Device("b200", 2250e12, 75e12, 37e12, 191.5e9, 7.7e12, 900e9, 100e9, 1000),
}  # fmt: skip


def find_device(name: str) -> Device:
    """A device of the list, or a JSON file: `{"based_on": "h100", "matmul_efficiency": 0.7, …}`."""
    if name in DEVICES:
        return DEVICES[name]
    if not name.endswith(".json"):
        raise UserError("--device", name, "there is no such device", f"choose of {', '.join(DEVICES)}, or give a JSON file")
    try:
        given = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError("--device", name, f"cannot be read: {error}", "give a file as docs/planning.md shows") from None
    return _device(name, given)


def _device(file: str, given: Any) -> Device:
    based_on = given.get("based_on") if isinstance(given, dict) else None
    if not isinstance(based_on, str) or based_on not in DEVICES:
        shown = based_on if isinstance(given, dict) else given
        why = "must name the device that it changes"
        raise UserError(f"{file}: based_on", shown, why, f"one of {', '.join(DEVICES)}")
    base = DEVICES[based_on]
    known = {field.name: field.type for field in dataclasses.fields(Device)}
    changes = {key: value for key, value in given.items() if key != "based_on"}
    for key, value in changes.items():
        if key not in known:
            raise UserError(f"{file}: {key}", value, "there is no such rate", f"choose of {', '.join(known)}")
        if why := _fault(key, known[key], value):
            raise UserError(f"{file}: {key}", value, why, f"{base.name} has {getattr(base, key)}")
    return dataclasses.replace(base, **{"name": Path(file).stem, **changes})


def _fault(key: str, kind: Any, value: Any) -> str:
    """What is wrong with a number or name of a file; empty: nothing."""
    if kind is str:
        return "" if isinstance(value, str) and value else "must be a text"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return "must be a whole number" if kind is int else "must be a number"
    if not 0 < value < float("inf"):
        return "must be a positive number"
    return "is a part of a rate, and at most 1" if key.endswith("_efficiency") and value > 1 else ""
