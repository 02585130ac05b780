"""What a start says about its configuration: what changed since the run of its checkpoint, and what
may be an oversight. What can only be a mistake is refused (settings/checks.py)."""

import math
from pathlib import Path

from errors import UserError
from runtime.start.host import connections_notice
from settings.config import Config
from settings.data_stages import DataStage, data_stages
from settings.load import changed_between, load_saved, settings_of

# Sections that do not change what is trained.
ABOUT_THE_RUN = ("run", "checkpoint")
FEW_SIGMAS = 3  # beyond which 0.1 % of normally distributed losses are


def notices(config: Config, path: Path | None, device: str, num_tokens: int) -> list[str]:
    """The lines for the log, before the run's own config.yaml is replaced.

    Args:
        config: of this start.
        path: the checkpoint that it continues from, or whose weights it begins with, if any.
        device: "cuda" or "cpu".
        num_tokens: of the data's tokenizer.
    """
    lines = connections_notice(config.parallel) if device == "cuda" else []
    lines += what_changed(path.resolve(), config) if path is not None else []
    if config.checkpoint.interval == "never":
        lines.append(
            "warning: checkpoint.interval is never: the run saves only when it is stopped, when it "
            "finds a file SAVE in its folder, and where a data stage ends"
        )
    model = config.model
    if model.vocab_size > num_tokens:  # many published models: Qwen3 has 151,936 for 151,669
        lines.append(
            f"model.vocab_size is {model.vocab_size:,}, and the data's tokenizer has "
            f"{num_tokens:,} tokens: the other {model.vocab_size - num_tokens:,} are never targets"
        )
    if model.has_experts and not (model.router_aux_weight or model.router_bias_rate):
        lines.append(
            "warning: nothing keeps the load of experts even: model.router_aux_weight and "
            "model.router_bias_rate are 0"
        )
    return lines + [f"warning: {doubt}" for doubt in doubts(config)]


def what_changed(path: Path, config: Config) -> list[str]:
    """At most one line: the settings that differ from those of the last start of the run folder
    that holds the checkpoint `path`, this run's or another's."""
    folder = path.parent.parent
    if path.parent.name != "checkpoints":  # a copy, or made by a tool
        return [f"what changed since {path} was saved is not known: no config.yaml belongs to it"]
    is_own = folder == Path(config.run.dir).resolve()
    since = "the previous start" if is_own else f"the last start of {folder}"
    try:
        changes = changed_settings(folder, config)
    except UserError as error:  # it is missing, or an older version's
        return [f"what changed since {since} is not known: {str(error).partition(chr(10))[0]}"]
    return [f"changed since {since}: {', '.join(changes)}"] if changes else []


def changed_settings(folder: Path, config: Config) -> list[str]:
    """Each setting that differs from those of the run `folder`: `train.steps 400 → 110`. Raises
    UserError if its file cannot be read."""
    before = load_saved(folder)
    old, new = settings_of(before), settings_of(config)
    training = {section: values for section, values in new.items() if section not in ABOUT_THE_RUN}
    stages = ["data_stages"] if before.data_stages != config.data_stages else []
    return changed_between(old, training) + stages


def doubts(config: Config) -> list[str]:
    """What a start warns of, in words."""
    return _of_training(config) + [
        f"{f'data_stages.{stage.number}.' if stage.number else ''}{doubt}"
        for stage in data_stages(config)
        if stage.phase.start == stage.steps.start  # else it is in the phase of the one before
        for doubt in _of_phase(stage)
    ]


def _of_training(config: Config) -> list[str]:
    found = []
    (first, second), sigmas = config.optimizer.betas, config.guard.spike_sigmas
    if first > second:
        found.append(
            f"optimizer.betas=[{first}, {second}]: the first is larger, so training may diverge; "
            "are they swapped?"
        )
    if 0 < sigmas < FEW_SIGMAS:
        share = math.erfc(sigmas / math.sqrt(2)) / 2
        found.append(
            f"guard.spike_sigmas={sigmas:g} skips about {share:.1%} of the updates of a healthy run"
        )
    keep, interval = config.checkpoint.keep_every, config.checkpoint.interval
    if keep and isinstance(interval, int) and interval and keep % interval:
        found.append(
            f"checkpoint.keep_every={keep} is no multiple of checkpoint.interval={interval}, so it "
            f"keeps only every {math.lcm(keep, interval):,}th step"
        )
    model = config.model
    if model.has_experts and model.experts_per_token == model.num_experts:
        found.append(
            f"model.experts_per_token={model.num_experts} is all experts: no token leaves one out, "
            "so the router chooses nothing"
        )
    return found


def _of_phase(stage: DataStage) -> list[str]:
    """About the learning rate of a phase."""
    optimizer, steps, found = stage.config.optimizer, len(stage.phase), []
    if not optimizer.lr:
        return ["optimizer.lr is 0: no weight changes"]
    if 0 < steps <= optimizer.warmup_steps:
        found.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is not less than the {steps} steps: "
            "the learning rate rises until the end"
        )
    shrinks = optimizer.lr * optimizer.weight_decay
    if shrinks > 1:
        found.append(
            f"optimizer.lr · optimizer.weight_decay is {shrinks:g}: above 1, each step turns the "
            "sign of every weight"
        )
    return found
