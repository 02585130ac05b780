"""Keys of earlier versions, which may have written a run's file. Keys that moved to the section of
the kind that reads them, and one with a new name, are read at both places, in a file and on the
command line; cpu_offload's old values, true and false, only in a file. One that is gone is ignored
in a file if it has no value.
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
GONE = {"guard.inject_fault"}  # files of earlier versions have it, usually without a value


def old_names(section: str) -> dict[str, str]:
    """The keys that have moved within a section, with their names now."""
    start = f"{section}."
    return {old.removeprefix(start): new for old, new in MOVED.items() if old.startswith(start)}


def at_new_places(section: str, given: dict[str, Any]) -> dict[str, Any]:
    """The content of a section, with moved keys in the sections of their kinds, and without keys
    that are gone, if they have no value."""
    moved = old_names(section)
    gone = {key for key, value in given.items() if f"{section}.{key}" in GONE and not value}
    found = {key: value for key, value in given.items() if key not in {*moved, *gone}}
    for key in [key for key in given if key in moved]:
        name, value = f"{section}.{key}", given[key]
        *kind, own = moved[key].split(".")
        there = found.get(kind[0], {}) if kind else found
        there = {} if there is None else there
        if not isinstance(there, dict):
            continue  # `experts: 5`, which the section refuses
        if own in there:
            raise UserError(name, value, "is given twice", f"keep {section}.{moved[key]}")
        if key == "cpu_offload" and isinstance(value, bool):
            value = "host" if value else "none"
        if value is not None:  # null meant that the key has no value
            found |= {kind[0]: {**there, own: value}} if kind else {own: value}
    return found
