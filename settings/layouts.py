"""Chooses a run's layout from `parallel.layouts`, by the number of ranks that there are.

    parallel: {zero_stage: 1, layouts: [
      {pp: 2, dp_shard: 2, tp: 2, micro_batch_size: 2},      # 8 ranks
      {dp_shard: 3, tp: 2, micro_batch_size: 1},             # 6
      {dp_shard: 2, tp: 2, micro_batch_size: 2}]}            # 4

A layout gives the keys in which it differs from the sections `parallel` and, for what decides how
much memory a rank needs, `train`. It never changes the global batch, so every layout trains on the
same samples. All data stages of a run are trained by the same ranks. One that gives a list of its
own has a layout for each number of ranks in it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from declare import no_such_key
from errors import UserError, within
from parallel.config import ParallelConfig
from settings.checks import validate
from settings.config import Config, Entry
from settings.data_stages import data_stages, in_data_stage
from settings.load import KEYS

# Keys of `train` that a layout may give; tools.plan --search chooses them with the axes.
OF_TRAIN = ("micro_batch_size", "activation_checkpointing")
KEYS_OF_LAYOUTS = [*(key for key in KEYS["parallel"] if key != "layouts"), *OF_TRAIN]
MAX_LAYOUTS = 100
LAYOUT = "parallel.layouts[{}]"  # the name of one in messages
Changes = dict[str, dict[str, Any]]  # section → key → value


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
    """The configuration with each layout of its list, in order."""
    later = list(zip(data_stages(config)[1:], config.data_stages, strict=True))
    if not config.parallel.layouts:
        for stage, _ in later:
            if own_list := stage.config.parallel.layouts:
                with in_data_stage(stage.number):
                    why = "the run has no list from which a layout would be chosen"
                    remedy = "give the section `parallel` of the file a list, too, or give the "
                    raise UserError("parallel.layouts", own_list, why, remedy + "keys here")
    found = []
    for number, changes in enumerate(_changes_by_layout(config)):
        with within(LAYOUT.format(number)):
            own = {name: replace(getattr(config, name), **keys) for name, keys in changes.items()}
            parallel, entries = own["parallel"], list[Entry]()
            num_ranks = _num_ranks(parallel)
            for stage, entry in later:
                with in_data_stage(stage.number):
                    entries.append(_with_layout(stage.config, entry, parallel, num_ranks))
                    parallel = replace(parallel, **entries[-1].get("parallel", {}))
            found.append(replace(config, **own, data_stages=tuple(entries)))
            data_stages(found[-1])  # raises if one does not fit
    return found


def _with_layout(config: Config, entry: Entry, before: ParallelConfig, num_ranks: int) -> Entry:
    """The entry of a data stage with the first layout of its own list that has `num_ranks` ranks.
    What neither gives is as in the data stage before, whose layout is `before`.

    config: of the data stage, as in the file.
    """
    if "layouts" not in entry.get("parallel", {}):
        return entry
    for number, changes in enumerate(_changes_by_layout(config)):
        new = entry | {name: entry.get(name, {}) | of for name, of in changes.items()}
        with within(LAYOUT.format(number)):
            axes = new["parallel"] | {"layers_per_stage": None}  # only ranks are counted here
            if _num_ranks(replace(before, **axes)) == num_ranks:
                return new
    why = f"none has {num_ranks} ranks, as a layout of the data stages before has"
    remedy = "give every data stage a layout for each number of ranks"
    raise UserError("parallel.layouts", config.parallel.layouts, why, remedy)


def _changes_by_layout(config: Config) -> Iterator[Changes]:
    """What each layout of the list changes: every key that any of them gives (where it leaves one
    out, the section's value, whatever was chosen before), and the list, completed in this way."""
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
    for layout in filled:
        changes: Changes = {"parallel": {"layouts": filled}, "train": {}}
        for key, value in layout.items():
            changes[sections[key]][key] = value
        yield changes


def _num_ranks(parallel: ParallelConfig) -> int:
    if parallel.dp_shard == -1:
        why, remedy = "-1 would fit many worlds", "give each layout a number of its own"
        raise UserError("parallel.dp_shard", -1, why, remedy)
    return parallel.num_ranks
