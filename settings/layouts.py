"""Chooses a run's layout from `parallel.layouts`, by the number of ranks that there are.

All data stages of a run are trained by the same ranks. One that gives a list of its own has a
layout for each number of ranks in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from errors import UserError
from parallel.layouts import OF_TRAIN, Layout
from settings.checks import validate
from settings.config import Config
from settings.data_stages import DataStage, data_stages, in_data_stage


def layout_sizes(config: Config) -> list[int]:
    """Every layout's number of ranks, in the order of the list. Checks only what they depend on."""
    return [one.parallel.num_ranks for one in _layouts(config)]


def checked_layouts(config: Config) -> list[tuple[int, Config]]:
    """Every layout's number of ranks and configuration, in the order of the list; empty if the
    configuration has no list. Each of these configurations has the whole list too, with every key
    that any layout gives, so that a run can be started from any of them again.

    Raises:
        UserError: a layout does not fit the model or the batch; the error names
            `parallel.layouts[2]`.
    """
    found = _layouts(config)
    for number, one in enumerate(found):
        with _naming(config, number):
            validate(one, one.parallel.num_ranks)
    return [(one.parallel.num_ranks, one) for one in found]


def choose_layout(config: Config, world: int) -> Config:
    """The configuration with the largest layout that `world` ranks are enough for (of equal ones
    the first); `config` itself if it has no list.

    Raises:
        UserError: all layouts need more ranks, or one of them is wrong.
    """
    found = checked_layouts(config)
    if not found:
        return config
    fits = [one for one in found if one[0] <= world]
    if not fits:
        least = min(found, key=lambda one: one[0])
        number = found.index(least)
        why = f"the world has {world} processes, and the smallest layout needs {least[0]}"
        remedy = f"start at least {least[0]} processes, or add a layout for {world}: "
        remedy += f"`python -m tools.plan CONFIG --gpus {world} --search` lists what fits"
        raise UserError(f"parallel.layouts[{number}]", config.parallel.layouts[number], why, remedy)
    return max(fits, key=lambda one: one[0])[1]


def valid_layout(config: Config, world: int) -> tuple[Config, int]:
    """What `world` processes train: the configuration with its layout, and how many of them train.
    Every command decides by this whether a configuration is right.

    Raises:
        UserError: the configuration, or a layout of its list, cannot be trained by them.
    """
    config = choose_layout(config, world)
    ranks = config.parallel.num_ranks if config.parallel.layouts else world
    validate(config, ranks)
    return config, ranks


def _value(config: Config, key: str) -> Any:
    return getattr(config.train if key in OF_TRAIN else config.parallel, key)


def _layouts(config: Config) -> list[Config]:
    """The configuration with each layout, in order."""
    found, later = [], list(zip(data_stages(config)[1:], config.data_stages, strict=True))
    for number, layout in enumerate(_filled(config)):
        with _naming(config, number):
            own = _with(config, layout)
            entries = [_with_layout(*one, own["parallel"].num_ranks) for one in later]
            found.append(replace(config, **own, data_stages=tuple(entries)))
            data_stages(found[-1])  # raises if one does not fit
    return found


def _filled(config: Config) -> list[Layout]:
    """The layouts, each with every key that any of them gives."""
    given = config.parallel.layouts
    keys = list(dict.fromkeys(key for layout in given for key in layout))
    return [{key: layout.get(key, _value(config, key)) for key in keys} for layout in given]


def _with(config: Config, layout: Layout) -> dict[str, Any]:
    """The two sections with a layout."""
    train = {key: value for key, value in layout.items() if key in OF_TRAIN}
    parallel = {key: value for key, value in layout.items() if key not in OF_TRAIN}
    if parallel.get("dp_shard", config.parallel.dp_shard) == -1:
        why, remedy = "-1 would fit many worlds", "give each layout a number of its own"
        raise UserError("parallel.dp_shard", -1, why, remedy)
    return {
        "parallel": replace(config.parallel, layouts=_filled(config), **parallel),
        "train": replace(config.train, **train),
    }


def _with_layout(stage: DataStage, entry: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """The entry of a data stage with the first layout of its own list that has `num_ranks` ranks.
    One without a list keeps the layout of the data stage before, but for the keys that it gives."""
    given = entry.get("parallel", {})
    if "layouts" not in given:
        return entry
    with in_data_stage(stage.number):
        layouts = _filled(stage.config)
        for layout in layouts:
            if _with(stage.config, layout)["parallel"].num_ranks == num_ranks:
                train = {key: layout[key] for key in OF_TRAIN if key in layout}
                parallel = {key: layout[key] for key in layout if key not in OF_TRAIN}
                parallel = {**given, "layouts": layouts, **parallel}
                return {**entry, "parallel": parallel, "train": {**entry.get("train", {}), **train}}
        why = f"none has {num_ranks} ranks, as a layout of the data stages before has"
        remedy = "give every data stage a layout for each number of ranks"
        raise UserError("parallel.layouts", stage.config.parallel.layouts, why, remedy)


@contextmanager
def _naming(config: Config, number: int) -> Iterator[None]:
    """Errors inside name the layout with this number."""
    try:
        yield
    except UserError as error:
        name, why = f"parallel.layouts[{number}]", f"{error.key} = {error.value}: {error.why}"
        raise UserError(name, config.parallel.layouts[number], why, error.remedy) from None
