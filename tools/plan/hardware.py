"""Rates of devices: what part of their data sheets' (hardware.py) programs reach."""

import dataclasses
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from errors import UserError
from hardware import DATA_SHEETS, DataSheet

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Device(DataSheet):
    """One GPU of a cluster, and its part of the network.

    The rates are the manufacturer's (hardware.py). The efficiencies are of a program without
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


def find_device(name: str) -> Device:
    """A device of the list, or a JSON file: `{"based_on": "h100", "matmul_efficiency": 0.7, …}`."""
    if name in DEVICES:
        return DEVICES[name]
    if not name.endswith(".json"):
        raise UserError(
            "--device",
            name,
            "there is no such device",
            f"choose of {', '.join(DEVICES)}, or give a JSON file",
        )
    try:
        given = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "--device", name, f"cannot be read: {error}", "give a file as docs/planning.md shows"
        ) from None
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
            raise UserError(
                f"{file}: {key}", value, "there is no such rate", f"choose of {', '.join(known)}"
            )
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
