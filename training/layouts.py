"""Chooses a run's layout from `parallel.layouts`, by the number of ranks that there are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from errors import UserError
from parallel.layouts import OF_TRAIN
from training.config import Config


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
            one.validate(one.parallel.num_ranks)
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


def _value(config: Config, key: str) -> Any:
    return getattr(config.train if key in OF_TRAIN else config.parallel, key)


def _layouts(config: Config) -> list[Config]:
    """The configuration with each layout, in order."""
    given = config.parallel.layouts
    keys = list(dict.fromkeys(key for layout in given for key in layout))
    filled = [{key: layout.get(key, _value(config, key)) for key in keys} for layout in given]
    found = []
    for number, layout in enumerate(filled):
        train = {key: value for key, value in layout.items() if key in OF_TRAIN}
        parallel = {key: value for key, value in layout.items() if key not in OF_TRAIN}
        with _naming(config, number):
            if parallel.get("dp_shard", config.parallel.dp_shard) == -1:
                why, remedy = "-1 would fit many worlds", "give each layout a number of its own"
                raise UserError("parallel.dp_shard", -1, why, remedy)
            one = replace(
                config,
                parallel=replace(config.parallel, layouts=filled, **parallel),
                train=replace(config.train, **train),
            )
        found.append(one)
    return found


@contextmanager
def _naming(config: Config, number: int) -> Iterator[None]:
    """Errors inside name the layout with this number."""
    try:
        yield
    except UserError as error:
        name, why = f"parallel.layouts[{number}]", f"{error.key} = {error.value}: {error.why}"
        raise UserError(name, config.parallel.layouts[number], why, error.remedy) from None
