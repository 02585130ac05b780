"""Data stages of a run: from a step or a token on, other data, lengths, batches, layouts or rates.

    data_stages:                         # after the sections of a configuration file
      - from_step: 9000                  # or from_token: 75_000_000_000
        data: {path: {prepared/web: 0.5, prepared/long: 0.5}}
        train: {seq_len: 131072, global_batch_size: 64, micro_batch_size: 1}
        parallel: {cp: 8}

Data stage 0 is the sections of the file. `data_stages.1` is the first entry of the list, and so on,
also in messages and on the command line (data_stages.1.train.seq_len=65536). An entry has the
settings that change; they hold until a later entry changes them again. One with `optimizer` begins
a new phase of the learning rate: its steps are counted from there, and warmup_steps and decay_steps
are 0 unless the entry gives them.

(A stage, without `data`, is one of the pipeline: parallel/.)
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from declare import LARGEST
from errors import UserError, within
from settings.config import Config, Entry

# How positions are rotated. A data stage may change it, or a new run that starts from weights, for
# example to learn from longer sequences (docs/context.md).
ROTATION_KEYS = {
    "rope_theta", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor",
    "rope_original_length",
}  # fmt: skip
# The settings that a data stage may change, by section; () : all of them.
CHANGEABLE: dict[str, tuple[str, ...]] = {
    "data": ("path", "document_mask"),
    "model": tuple(sorted(ROTATION_KEYS)),
    "train": ("seq_len", "global_batch_size", "micro_batch_size", "activation_checkpointing",
              "compile", "eval_interval", "eval_samples"),
    "parallel": (),
    "optimizer": ("lr", "schedule", "warmup_steps", "decay_steps", "min_lr_ratio"),
}  # fmt: skip
BEGINS = {"from_step": LARGEST, "from_token": 2**62}  # the largest values
MAX_DATA_STAGES = 100  # a checkpoint lists those that have ended
NEW_PHASE = {"optimizer": {"warmup_steps": 0, "decay_steps": 0}}  # of the learning rate


@dataclass(frozen=True)
class DataStage:
    """A data stage of a run; a run without `data_stages` is one."""

    number: int
    steps: range  # 0-based
    phase: range  # the steps over which its learning rate is scheduled
    config: Config  # of a run that has only this data stage


def data_stages(config: Config) -> list[DataStage]:
    """The data stages of a run. Raises UserError."""
    end = config.train.steps
    configs, begins, tokens = [replace(config, data_stages=())], [0], 0
    for number, entry in enumerate(config.data_stages, 1):
        before, begin = configs[-1], begins[-1]
        per_step = before.train.global_batch_size * before.train.seq_len
        key, value = next((name, entry[name]) for name in BEGINS if name in entry)
        # from_token: the first step before which at least so many tokens are trained on
        step = value if key == "from_step" else begin - (tokens - value) // per_step
        if not begin < step < end:
            why = f"it would begin after step {step}, the data stage before begins after step "
            why += f"{begin}, and train.steps={end}"
            remedy = "each data stage needs a step; give more train.steps, or leave it out "
            remedy += "(data_stages=[] leaves out all)"
            raise UserError(f"data_stages.{number}.{key}", value, why, remedy)
        with in_data_stage(number):
            own = {
                name: replace(getattr(before, name), **NEW_PHASE.get(name, {}) | entry[name])
                for name in entry
                if name not in BEGINS
            }
        configs.append(replace(before, **own))
        begins.append(step)
        tokens += (step - begin) * per_step
    entries = zip(begins, ({"optimizer"}, *config.data_stages), strict=True)
    phases = [begin for begin, entry in entries if "optimizer" in entry]  # where each begins
    found = []
    for number, (begin, one) in enumerate(zip(begins, configs, strict=True)):
        first = max(step for step in phases if step <= begin)
        phase = range(first, min((step for step in phases if step > begin), default=end))
        steps = range(begin, [*begins, end][number + 1])
        found.append(DataStage(number, steps, phase, one))
    return found


def data_stage_of(stages: Sequence[DataStage], step: int) -> DataStage:
    """The data stage that makes step `step`, 0-based; the last one for later steps."""
    return stages[sum(step >= one.steps.start for one in stages[1:])]


def tokens_after(stages: Sequence[DataStage], step: int) -> int:
    """How many tokens are trained on in the first `step` steps."""
    return sum(
        len(range(one.steps.start, min(step, one.steps.stop)))
        * one.config.train.global_batch_size
        * one.config.train.seq_len
        for one in stages
    )


def read_entries(raw: Any) -> tuple[Entry, ...]:
    """The list in a file, whose form is checked; values are checked when they are used. Raises
    UserError."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        remedy = "write `data_stages:`, then `- from_step: …` for each"
        raise UserError("data_stages", raw, "is not a list of data stages", remedy)
    if len(raw) > MAX_DATA_STAGES:
        why = f"has {len(raw)} data stages: too many"
        raise UserError("data_stages", raw, why, f"give at most {MAX_DATA_STAGES}")
    for number, entry in enumerate(raw, 1):
        _check_form(f"data_stages.{number}", entry)
    return tuple(raw)


def _check_form(place: str, entry: Any) -> None:
    if not isinstance(entry, dict) or len(entry.keys() & BEGINS.keys()) != 1:
        why, remedy = "does not say where it begins", "give from_step or from_token, then sections"
        raise UserError(place, entry, why, remedy)
    fixed = "a data stage cannot change it"
    for name, given in entry.items():
        if name in BEGINS:
            if type(given) is not int or not 1 <= given <= BEGINS[name]:
                why = f"is not a number of {name.removeprefix('from_')}s"
                raise UserError(f"{place}.{name}", given, why, "give a whole number, 1 or more")
        elif name not in CHANGEABLE:
            remedy = f"it may have {', '.join([*BEGINS, *CHANGEABLE])}"
            raise UserError(f"{place}.{name}", given, fixed, remedy)
        elif not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
            why, remedy = "is not a section with keys", f"write `{name}: {{key: value}}`"
            raise UserError(f"{place}.{name}", given, why, remedy)
        else:
            can = CHANGEABLE[name] or given
            for key in (key for key in given if key not in can):
                may = ", ".join(f"{name}.{each}" for each in can)
                remedy = f"set it for the whole run; it may change {may}"
                raise UserError(f"{place}.{name}.{key}", given[key], fixed, remedy)


def in_data_stage(number: int) -> AbstractContextManager[None]:
    """Let a UserError about a later data stage name it: `data_stages.1.train.seq_len`."""
    return within(f"data_stages.{number}") if number else nullcontext()
