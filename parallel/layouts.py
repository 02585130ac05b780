"""The list `parallel.layouts`: how a run is split on worlds of different sizes.

    parallel: {zero_stage: 1, layouts: [
      {pp: 2, dp_shard: 2, tp: 2, micro_batch_size: 2},      # 8 ranks
      {dp_shard: 3, tp: 2, micro_batch_size: 1},             # 6
      {dp_shard: 2, tp: 2, micro_batch_size: 2}]}            # 4

A layout gives the keys in which it differs from the sections `parallel` and, for what decides how
much memory a rank needs, `train`. It never changes the global batch, so every layout trains on the
same samples. settings/layouts.py checks the list and chooses from it.
"""

from dataclasses import fields
from typing import Any

from declare import no_such_key
from errors import UserError

# Keys of `train` that a layout may give; tools.plan --search chooses them with the axes.
OF_TRAIN = ("micro_batch_size", "activation_checkpointing")
Layout = dict[str, Any]
MAX_LAYOUTS = 100


def check_keys(layouts: list[Layout], parallel: type) -> None:
    """Raise UserError if the list is too long, or a layout has a key that `parallel`, the section's
    class, does not have. (Its values are checked where the section is built from them.)"""
    if len(layouts) > MAX_LAYOUTS:
        why = f"has {len(layouts)} layouts: too many"
        raise UserError("parallel.layouts", layouts, why, f"give at most {MAX_LAYOUTS}")
    names = [field.name for field in fields(parallel) if field.name != "layouts"]
    for number, layout in enumerate(layouts):
        name = f"parallel.layouts[{number}]"
        if not layout:
            raise UserError(name, layout, "has no keys", "give its axes, for example {dp_shard: 2}")
        for key, value in layout.items():
            if key not in (*names, *OF_TRAIN):
                raise no_such_key(name, key, value, {name: [*names, *OF_TRAIN]})
