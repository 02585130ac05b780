"""What a start says about its configuration: what changed since the previous start, and what may be
an oversight."""

from pathlib import Path

from errors import UserError
from runtime.start.connections import connections_notice
from training.config import Config
from training.load_config import changed_between, load_config, settings_of

# Sections that do not change what is trained.
ABOUT_THE_RUN = ("run", "checkpoint")


def notices(config: Config, resumes: bool, device: str) -> list[str]:
    """The lines for the log, before the run's own config.yaml is replaced.

    Args:
        config: of this start.
        resumes: whether it continues from a checkpoint.
        device: "cuda" or "cpu".
    """
    lines = connections_notice(config.parallel) if device == "cuda" else []
    changes = changed_settings(Path(config.run.dir) / "config.yaml", config) if resumes else []
    if changes:
        lines.append(f"changed since the previous start: {', '.join(changes)}")
    if config.checkpoint.interval == "never":
        lines.append(
            "warning: checkpoint.interval is never: the run saves only when it is stopped, when it "
            "finds a file SAVE in its folder, and where a stage ends"
        )
    model = config.model
    if model.has_experts and not (model.router_aux_weight or model.router_bias_rate):
        lines.append(
            "warning: nothing keeps the load of experts even: model.router_aux_weight and "
            "model.router_bias_rate are 0"
        )
    return lines


def changed_settings(file: Path, config: Config) -> list[str]:
    """Each setting that differs from those in `file`: `train.steps 400 → 110`. Empty if the file
    cannot be read: it may be an older version's."""
    try:
        before = load_config(str(file), [])
    except UserError:
        return []
    old, new = (settings_of(one.whole) for one in (before, config))
    training = {section: values for section, values in new.items() if section not in ABOUT_THE_RUN}
    stages = ["stages"] if before.stages != config.stages else []
    return changed_between(old, training) + stages
