"""Stages of a run: from a step or a token on, other data, lengths, batches, layouts or rates.

    stages:                              # after the sections of a configuration file
      - from_step: 9000                  # or from_token: 75_000_000_000
        data: {path: {prepared/web: 0.5, prepared/long: 0.5}}
        train: {seq_len: 131072, global_batch_size: 64, micro_batch_size: 1}
        parallel: {cp: 8}

Stage 0 is the sections of the file. `stages.1` is the first entry of the list, and so on, also in
messages and on the command line (stages.1.train.seq_len=65536). An entry has the settings that
change; they hold until a later entry changes them again. One with `optimizer` begins a new phase of
the learning rate: its steps are counted from there, and warmup_steps and decay_steps are 0 unless
the entry gives them.

(Pipeline stages, in parallel/, are something else.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from declare import LARGEST
from errors import UserError

MAX_STAGES = 100
# How positions are rotated. A stage may change it, or a new run that starts from weights, for
# example to learn from longer sequences (docs/context.md).
ROTATION_KEYS = {
    "rope_theta", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor",
    "rope_original_length",
}  # fmt: skip
# The settings that a stage may change, by section; () : all of them.
CHANGEABLE: dict[str, tuple[str, ...]] = {
    "data": ("path", "document_mask"),
    "model": tuple(sorted(ROTATION_KEYS)),
    "train": (
        "seq_len",
        "global_batch_size",
        "micro_batch_size",
        "activation_checkpointing",
        "compile",
        "eval_interval",
        "eval_samples",
    ),
    "parallel": (),
    "optimizer": ("lr", "schedule", "warmup_steps", "decay_steps", "min_lr_ratio"),
}
BEGINS = {"from_step": LARGEST, "from_token": 2**62}  # the largest values
NEW_PHASE = {"warmup_steps": 0, "decay_steps": 0}  # of the learning rate


@dataclass(frozen=True)
class LaterStage:
    """An entry of `stages`: where it begins, and the settings that change, by section."""

    begins: tuple[str, int]  # a name of BEGINS, and its value
    changes: dict[str, dict[str, Any]]

    @staticmethod
    def read(number: int, raw: Any) -> "LaterStage":
        """Check the form of an entry, read from a file; values are checked when they are used.
        Raises UserError."""
        place = f"stages.{number}"
        if not isinstance(raw, dict):
            raise UserError(place, raw, "is not a stage", "write `from_step: 1000`, then sections")
        begins = [(name, raw[name]) for name in BEGINS if name in raw]
        if len(begins) != 1:
            why = "must say where it begins, once"
            raise UserError(place, raw, why, "give from_step, or from_token")
        name, value = begins[0]
        if type(value) is not int or not 1 <= value <= BEGINS[name]:
            why = "is not a number of steps" if name == "from_step" else "is not a number of tokens"
            raise UserError(f"{place}.{name}", value, why, "give a whole number, 1 or more")
        changes = {section: keys for section, keys in raw.items() if section not in BEGINS}
        for section, keys in changes.items():
            if section not in CHANGEABLE:
                can = ", ".join([*BEGINS, *CHANGEABLE])
                why = "a stage cannot change it"
                raise UserError(f"{place}.{section}", keys, why, f"a stage may have {can}")
            if not isinstance(keys, dict):
                why = "is not a section with keys"
                raise UserError(
                    f"{place}.{section}", keys, why, f"write `{section}: {{key: value}}`"
                )
            for key, setting in keys.items():
                if not isinstance(key, str):
                    raise UserError(
                        f"{place}.{section}", keys, f"{key!r} is not a key", "correct it"
                    )
                if CHANGEABLE[section] and key not in CHANGEABLE[section]:
                    why = "a stage cannot change it"
                    can = ", ".join(f"{section}.{name}" for name in CHANGEABLE[section])
                    remedy = f"set it in the section, for the whole run; a stage may change {can}"
                    raise UserError(f"{place}.{section}.{key}", setting, why, remedy)
        return LaterStage((name, value), changes)

    @property
    def raw(self) -> dict[str, Any]:
        """The entry as in a file."""
        return {self.begins[0]: self.begins[1], **self.changes}

    def first_step(self, before: int, tokens: int, tokens_per_step: int) -> int:
        """The number of steps made when the stage begins. A stage with from_token begins with the
        first step before which at least so many tokens are trained on.

        before, tokens: steps made and tokens trained on when the stage before begins.
        tokens_per_step: of that stage.
        """
        name, value = self.begins
        return value if name == "from_step" else before + -(-(value - tokens) // tokens_per_step)


def read_stages(raw: Any) -> tuple[LaterStage, ...]:
    """The entries of a file's `stages`. Raises UserError."""
    if raw is None:
        return ()
    if not isinstance(raw, list) or len(raw) > MAX_STAGES:
        why = f"is not a list of at most {MAX_STAGES} stages"
        raise UserError("stages", raw, why, "write `stages:`, then `- from_step: …` for each")
    return tuple(LaterStage.read(number, entry) for number, entry in enumerate(raw, 1))


@contextmanager
def in_stage(number: int) -> Iterator[None]:
    """Let a UserError about a later stage name it: `stages.1.train.seq_len`."""
    try:
        yield
    except UserError as error:
        if not number or error.key.startswith("stages."):
            raise
        key = f"stages.{number}.{error.key}"
        raise UserError(key, error.value, error.why, error.remedy) from None
