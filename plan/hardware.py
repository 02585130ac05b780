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

    The first seven numbers are the manufacturer's. The efficiencies are of a program without special cases: they hold for all
    models and layouts, and `python -m benchmarks.plan_megatron` shows what they are worth. A JSON file of measured rates
    may replace any of them.
    """

    name: str
    peak_flops: float  # a second, dense, bfloat16
    memory_bytes: float
    memory_bytes_per_second: float
    node_bytes_per_second: float  # from one GPU to the others of its node, one direction
    network_bytes_per_second: float  # from one GPU to other nodes, one direction
    watts: float
    gpus_per_node: int = 8
    reserved_bytes: float = 6e9  # context, NCCL's buffers, fragmentation: what a run cannot have
    matmul_efficiency: float = 0.71  # of large products
    matmul_ramp: int = 160  # a product takes as long as if its inner dimension were this much longer
    attention_efficiency: float = 0.3
    memory_efficiency: float = 0.42
    node_efficiency: float = 0.8
    network_efficiency: float = 0.85
    kernel_seconds: float = 10e-6  # beginning and end of one kernel
    collective_seconds: float = 12e-6  # of one collective inside a node
    step_seconds: float = 0.02  # of a step besides: the host, ranks that wait for each other


DEVICES = {  # NVIDIA's data sheets; the usual networks: 200 Gb/s beside A100, 400 Gb/s beside H100, 800 Gb/s beside B200
    "a100": Device("a100", 312e12, 80e9, 2.04e12, 300e9, 25e9, 400),
    "h100": Device("h100", 989e12, 80e9, 3.35e12, 450e9, 50e9, 700),
    "h200": Device("h200", 989e12, 141e9, 4.8e12, 450e9, 50e9, 700),
    "b200": Device("b200", 2250e12, 180e9, 7.7e12, 900e9, 100e9, 1000),
}


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
    if not isinstance(given, dict) or given.get("based_on") not in DEVICES:
        raise UserError(f"{file}: based_on", given if not isinstance(given, dict) else given.get("based_on"),
                        "must name the device that it changes", f"one of {', '.join(DEVICES)}")  # fmt: skip
    base = DEVICES[given["based_on"]]
    known = {field.name: type(getattr(base, field.name)) for field in dataclasses.fields(Device)}
    changes = {key: value for key, value in given.items() if key != "based_on"}
    for key, value in changes.items():
        if key not in known:
            raise UserError(f"{file}: {key}", value, "there is no such rate", f"choose of {', '.join(known)}")
        if known[key] is not str and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise UserError(f"{file}: {key}", value, "must be a positive number", f"the data sheet says {getattr(base, key)}")
    return dataclasses.replace(base, **{"name": Path(file).stem, **changes})
