"""What a start, or a later data stage of it, writes down before its first step: what is trained,
how and from where, what changed since the run of its checkpoint, and what may be an oversight.
(What can only be a mistake is refused: settings/checks.py.)"""

import math
import sys
from pathlib import Path

import torch.distributed as dist

from costs.parameters import num_parameters
from costs.summary import flops_per_token
from costs.units import CannotRecord
from data.dataset import Mixture
from errors import UserError
from model.experts import Experts
from model.router import router_class
from parallel.mesh import Mesh
from runtime.files import write_or_warn
from runtime.listener import Listener, Run
from runtime.output import log
from runtime.start.attention import describe_attention
from runtime.start.environment import local_world
from runtime.start.host import connections_notice
from runtime.start.topology import describe_nodes, describe_places, describe_stages
from settings.config import SECTIONS, Config
from settings.data_stages import DataStage, data_stages
from settings.load import changed_between, dump_config, load_saved

# Sections that do not change what is trained.
ABOUT_THE_RUN = ("run", "checkpoint")
FEW_SIGMAS = 3  # beyond which 0.1 % of normally distributed losses are


def announce(run: Run, whole: Config, data: Mixture, spares: dict[str, int]) -> None:
    """Begin the start in the run's log, write config.yaml, and log what is to be trained, how and
    from where. Called by every rank, once the state has been loaded.

    Args:
        whole: the configuration of the whole run.
        data: to train on.
        spares: node → number of its ranks that wait.
    """
    config, start, mesh = run.config, run.start, run.train.mesh
    resumed = None if start.weights_only else start.path
    about = run.log.start(start.step, dist.get_world_size(), resumed)
    if spares:
        run.log.event("spares", step=start.step, ranks=spares)
    if dist.get_rank() != 0:
        return
    folder = Path(config.run.dir)
    about += notices(whole, start.path, mesh.device, data.vocab_size)  # reads the last config.yaml
    write_or_warn(folder / "config.yaml", dump_config(whole))
    about += [f"{num_parameters(config.model):,} parameters on {mesh.describe()}"]
    about += _costs(config, mesh)
    about += [describe_attention(config, mesh.device)]
    begins = f"starting from {start.path or 'initial weights'} at step {start.step}"
    log("\n".join([*about, f"{begins}; run folder {folder}"]), sys.stdout)


class DataStageBegins(Listener):
    """Logs and records the beginning of a data stage, with what changes:
    `train.seq_len 8192 → 131072`.

    config: of the whole run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def begins(self, run: Run) -> None:
        if not self.config.data_stages or dist.get_rank() != 0:
            return
        stages = data_stages(self.config)
        number, steps = run.data_stage.number, run.data_stage.steps
        where = f"data stage {number} of 0 to {len(stages) - 1}, "
        where += f"steps {steps.start + 1} to {steps.stop}"
        if number == 0 or run.step > steps.start:
            log(f"this is {where}")
            return
        before, now = (one.config for one in stages[number - 1 : number + 1])
        changes = changed_between(before, now, SECTIONS)
        run.log.event("data_stage", data_stage=number, step=run.step, changes=changes)
        log(f"{where}, begins: {', '.join(changes) or 'nothing changes'}")


def _costs(config: Config, mesh: Mesh) -> list[str]:
    """Describe the layout and its costs."""
    ranks_per_node = local_world(dist.get_world_size())
    try:
        flops_per_token(config.model, config.train.seq_len)
        lines = [describe_places(config, mesh, ranks_per_node)]
        return lines + ([describe_stages(config)] if config.parallel.num_stages > 1 else [])
    except CannotRecord as error:
        return [describe_nodes(mesh.sizes, ranks_per_node), f"warning: no MFU: {error}"]


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
    if (experts := model.find(Experts)) is not None and not (
        experts.router_aux_weight or router_class(model.router).bias_rate(model)
    ):
        lines.append(
            "warning: nothing keeps the load of experts even: model.experts.router_aux_weight is "
            "0, and no router has a bias that follows it (model.sigmoid_bias.bias_rate)"
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
    training = [section for section in SECTIONS if section not in ABOUT_THE_RUN]
    stages = ["data_stages"] if before.data_stages != config.data_stages else []
    return changed_between(before, config, training) + stages


def doubts(config: Config) -> list[str]:
    """What a start warns of, in words."""
    return _of_training(config) + [
        f"{f'data_stages.{stage.number}.' if stage.number else ''}{doubt}"
        for stage in data_stages(config)
        if stage.phase.start == stage.steps.start  # else it is in the phase of the one before
        for doubt in _of_phase(stage)
    ]


def _of_training(config: Config) -> list[str]:
    found = [*config.model.doubts(), *config.optimizer.doubts()]
    sigmas = config.guard.spike_sigmas
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
