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


def layouts(
    config: Config, least: int, most: int, device: Device
) -> tuple[list[Found], dict[int, str]]:
    """The fastest layout that fits, for every number of nodes between those of `most` GPUs and of
    `least`; and why there is none, by number of GPUs. A layout that is slower than one of fewer
    GPUs is left out: those train faster with spares."""
    if not 1 <= least <= most:
        raise UserError("--layouts", least, "is not between 1 and --gpus", f"give at most {most}")
    single = replace(config, parallel=replace(config.parallel, layouts=[]))
    step = min(GPUS_PER_NODE, most)
    worlds = range(-(-least // step) * step, most + 1, step)
    if len(worlds) > MAX_LAYOUTS:
        why = f"{len(worlds):,} numbers of nodes, and a list has at most {MAX_LAYOUTS} layouts"
        raise UserError("--layouts", least, why, f"give {worlds[-MAX_LAYOUTS]} or more")
    found: list[Found] = []
    refused = {}
    for world in worlds:
        try:
            best = search(single, world, device, wanted=1).best[0]
        except UserError as error:
            refused[world] = f"{error.key} = {error.value}: {error.why}"
            continue
        if not found or best.seconds < found[-1].seconds:
            found.append(best)
    if not found:
        raise UserError("--layouts", least, *_last(refused))
    return found[::-1], refused


def describe_layouts(config: Config, least: int, most: int, device: Device) -> str:
    """The list as YAML, then the numbers of GPUs that no layout uses."""
    found, refused = layouts(config, least, most, device)
    lines = [f"{world} GPUs: {why}" for world, why in refused.items()]
    return "\n".join([as_yaml(config, found), *lines])


def as_yaml(config: Config, found: list[Found]) -> str:
    """The list as it is pasted into the section `parallel`: the axes, and every other key in which
    one of the layouts differs from `config`."""
    lines = ["parallel:", "  layouts:"]
    values = [_values(one.config) for one in found]
    own = _values(config)
    axes = [*AXES, *(["ep"] if config.model.has_experts else [])]
    # an axis that is 1 everywhere says nothing
    keys = [
        key
        for key in (*axes, *(key for key in own if key not in axes))
        if key == "dp_shard" or any(one[key] != own[key] for one in values)
    ]
    for one, values_of_one in zip(found, values, strict=True):
        given = {key: values_of_one[key] for key in keys}
        text = ", ".join(f"{key}: {as_text(value)}" for key, value in given.items())
        lines.append(f"  - {{{text}}} # {one.world} GPUs, {one.seconds:.3f} s a step")
    return "\n".join(lines)


def _values(config: Config) -> dict[str, Any]:
    keys = dict.fromkeys((*AXES, "ep", *SEARCHED, "sequence_parallel"))
    values = {key: getattr(config.parallel, key) for key in keys}
    return values | {key: getattr(config.train, key) for key in OF_TRAIN}


def _last(refused: dict[int, str]) -> tuple[str, str]:
    return f"no layout fits: {list(refused.values())[-1]}", "use more GPUs, or another batch size"
