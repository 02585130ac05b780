"""The list `parallel.layouts` for a range of node counts: `tools.plan --search --layouts MIN`."""

from dataclasses import replace
from typing import Any

from errors import UserError
from parallel.axes import AXES
from parallel.layouts import MAX_LAYOUTS, OF_TRAIN
from tools.plan.hardware import Device
from tools.plan.search import SEARCHED, Found, as_text, search
from training.config import Config

GPUS_PER_NODE = 8


def describe_layouts(config: Config, least: int, most: int, device: Device) -> str:
    """The list as YAML: the fastest layout that fits, for every number of nodes between those of
    `most` GPUs and of `least`; then why there is none, by number of GPUs. A layout that is slower
    than one of fewer GPUs is left out: those train faster with spares."""
    if not 1 <= least <= most:
        raise UserError("--layouts", least, "is not between 1 and --gpus", f"give at most {most}")
    single = replace(config, parallel=replace(config.parallel, layouts=[]))
    step = min(GPUS_PER_NODE, most)
    worlds = range(-(-least // step) * step, most + 1, step)
    if len(worlds) > MAX_LAYOUTS:
        why = f"{len(worlds):,} numbers of nodes, and a list has at most {MAX_LAYOUTS} layouts"
        raise UserError("--layouts", least, why, f"give {worlds[-MAX_LAYOUTS]} or more")
    found: list[Found] = []
    refused = []
    for world in worlds:
        try:
            best = search(single, world, device, wanted=1).best[0]
        except UserError as error:
            refused.append(f"{world} GPUs: {error.key} = {error.value}: {error.why}")
            continue
        if not found or best.seconds < found[-1].seconds:
            found.append(best)
    if not found:
        why = f"no layout fits: {refused[-1]}"
        raise UserError("--layouts", least, why, "use more GPUs, or another batch size")
    return "\n".join([as_yaml(config, found[::-1]), *refused])


def as_yaml(config: Config, found: list[Found]) -> str:
    """The list as it is pasted into the section `parallel`: the axes, and every other key in which
    one of the layouts differs from `config`."""
    own, values = _values(config), [_values(one.config) for one in found]
    # an axis that is 1 everywhere says nothing
    keys = [key for key in own if key == "dp_shard" or any(one[key] != own[key] for one in values)]
    lines = ["parallel:", "  layouts:"]
    for one, given in zip(found, values, strict=True):
        text = ", ".join(f"{key}: {as_text(given[key])}" for key in keys)
        lines.append(f"  - {{{text}}} # {one.world} GPUs, {one.seconds:.3f} s a step")
    return "\n".join(lines)


def _values(config: Config) -> dict[str, Any]:
    experts = ["ep"] if config.model.has_experts else []
    keys = dict.fromkeys((*AXES, *experts, *SEARCHED, "sequence_parallel"))
    values = {key: getattr(config.parallel, key) for key in keys}
    return values | {key: getattr(config.train, key) for key in OF_TRAIN}
