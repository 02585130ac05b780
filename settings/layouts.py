"""Chooses a run's layout from `parallel.layouts`, by the number of ranks that there are.

    parallel: {zero_stage: 1, layouts: [
      {pp: 2, dp_shard: 2, tp: 2, micro_batch_size: 2},      # 8 ranks
      {dp_shard: 3, tp: 2, micro_batch_size: 1},             # 6
      {dp_shard: 2, tp: 2, micro_batch_size: 2}]}            # 4

A layout gives the keys in which it differs from the sections `parallel` and, for what decides how
much memory a rank needs, `train`. It never changes the global batch, so every layout trains on the
same samples. All data stages of a run are trained by the same ranks; one that changes the layout
(`parallel: {cp: 4, dp_shard: -1}`) changes each of the list.
"""

from dataclasses import replace
from typing import Any

from declare import no_such_key
from errors import UserError, within
from settings.checks import validate
from settings.config import Config
from settings.data_stages import data_stages
from settings.load import KEYS

# Keys of `train` that a layout may give; tools.plan --search chooses them with the axes.
OF_TRAIN = ("micro_batch_size", "activation_checkpointing")
KEYS_OF_LAYOUTS = [*(key for key in KEYS["parallel"] if key != "layouts"), *OF_TRAIN]
MAX_LAYOUTS = 100
LAYOUT = "parallel.layouts[{}]"  # the name of one in messages


def layout_sizes(config: Config) -> list[int]:
    """Every layout's number of ranks, in the order of the list. Checks only what they depend on."""
    return [one.parallel.num_ranks for one in _with_each_layout(config)]


def choose_layout(config: Config, world: int) -> Config:
    """The configuration with the largest layout that `world` ranks are enough for (of equal ones
    the first); `config` itself if it has no list. It has the whole list too, with every key that
    any layout gives, so that a run can be started from it again on any number of ranks.

    Raises:
        UserError: all layouts need more ranks; or one of them, chosen or not, does not fit the
            model or the batch. The error names it, and then what does not fit:
            `parallel.layouts[2].parallel.tp`.
    """
    found = _with_each_layout(config)
    if not found:
        return config
    for number, one in enumerate(found):
        with within(LAYOUT.format(number)):
            validate(one, one.parallel.num_ranks)
    sizes = [one.parallel.num_ranks for one in found]
    if min(sizes) > world:
        number = sizes.index(min(sizes))
        why = f"the world has {world} processes, and the smallest layout needs {min(sizes)}"
        remedy = f"start at least {min(sizes)} processes, or add a layout for {world}: "
        remedy += f"`python -m tools.plan CONFIG --gpus {world} --search` lists what fits"
        raise UserError(LAYOUT.format(number), config.parallel.layouts[number], why, remedy)
    return found[sizes.index(max(size for size in sizes if size <= world))]


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


def _with_each_layout(config: Config) -> list[Config]:
    """The configuration with each layout of its list, in order. Each has every key that any of them
    gives (where it leaves one out, the section's value, whatever was chosen before), and the list,
    completed in this way."""
    given = config.parallel.layouts
    if len(given) > MAX_LAYOUTS:
        why = f"has {len(given)} layouts: too many"
        raise UserError("parallel.layouts", given, why, f"give at most {MAX_LAYOUTS}")
    for number, layout in enumerate(given):
        for key, value in layout.items():
            if key not in KEYS_OF_LAYOUTS:
                name = LAYOUT.format(number)
                raise no_such_key(name, key, value, {name: KEYS_OF_LAYOUTS})
    sections = {key: "train" if key in OF_TRAIN else "parallel" for each in given for key in each}
    values = {key: getattr(getattr(config, name), key) for key, name in sections.items()}
    filled = [values | layout for layout in given]
    found = []
    for number, layout in enumerate(filled):
        changes: dict[str, dict[str, Any]] = {"parallel": {"layouts": filled}, "train": {}}
        for key, value in layout.items():
            changes[sections[key]][key] = value
        with within(LAYOUT.format(number)):
            if changes["parallel"].get("dp_shard", config.parallel.dp_shard) == -1:
                why, remedy = "-1 would fit many worlds", "give each layout a number of its own"
                raise UserError("parallel.dp_shard", -1, why, remedy)
            own = {name: replace(getattr(config, name), **keys) for name, keys in changes.items()}
            found.append(replace(config, **own))
            data_stages(found[-1])  # raises if one does not fit
    return found
