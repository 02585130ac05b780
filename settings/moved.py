"""Keys that have moved to the section of the kind that reads them, at their old places; and one
with a new name.

In a file they are read at both, because a run of an earlier version has written all of them. So
they are on the command line, except for those of `REFUSED`, whose new name the refusal says.
"""

from typing import Any

from errors import UserError

# old name → name within the same section
MOVED = {
    "model.num_experts": "experts.count",
    "model.experts_per_token": "experts.per_token",
    "model.expert_ffn_dim": "experts.ffn_dim",
    "model.num_shared_experts": "experts.num_shared",
    "model.num_dense_layers": "experts.num_dense_layers",
    "model.router_scale": "experts.router_scale",
    "model.router_aux_weight": "experts.router_aux_weight",
    "model.router_z_weight": "experts.router_z_weight",
    "model.attention_window": "sliding_window.window",
    "model.router_bias_rate": "sigmoid_bias.bias_rate",
    "optimizer.betas": "adamw.betas",
    "optimizer.eps": "adamw.eps",
    "parallel.cpu_offload": "offload",
}
REFUSED = {"model.attention_window", "model.router_scale", "optimizer.eps", "parallel.cpu_offload"}
VALUES = {"parallel.cpu_offload": {False: "none", True: "host"}}  # old value → value


def new_name(section: str, key: str, value: Any) -> str:
    """The name of a command line's `key` in its section now: `sliding_window.window`. Raises
    UserError."""
    name = f"{section}.{key}"
    if name in REFUSED:
        values = [f"={new}" for new in VALUES.get(name, {}).values()] or [""]
        new = " or ".join(f"{section}.{MOVED[name]}{each}" for each in values)
        raise UserError(name, value, "has moved", f"write {new}")
    return MOVED.get(name, key)


def old_names(section: str) -> dict[str, str]:
    """The keys that have moved within a section, with their names now."""
    start = f"{section}."
    return {old.removeprefix(start): new for old, new in MOVED.items() if old.startswith(start)}


def at_new_places(section: str, given: dict[str, Any]) -> dict[str, Any]:
    """The content of a section, with moved keys in the sections of their kinds."""
    moved = old_names(section)
    found = {key: value for key, value in given.items() if key not in moved}
    for key in [key for key in given if key in moved]:
        name, value = f"{section}.{key}", given[key]
        *kind, own = moved[key].split(".")
        there = found.get(kind[0], {}) if kind else found
        there = {} if there is None else there
        if not isinstance(there, dict):
            continue  # `experts: 5`, which the section refuses
        if own in there:
            raise UserError(name, value, "is given twice", f"keep {section}.{moved[key]}")
        if isinstance(value, bool):
            value = VALUES.get(name, {}).get(value, value)
        if value is not None:  # null meant that the key has no value
            found |= {kind[0]: {**there, own: value}} if kind else {own: value}
    return found
