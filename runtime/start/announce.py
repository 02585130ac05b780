"""What a start, or a later data stage of it, writes down before its first step: what is trained,
how and from where, what changed since the run of its checkpoint, and what may be an oversight.
(What can only be a mistake is refused: settings/checks.py.)"""

import math
import os
import sys
from pathlib import Path

import torch.distributed as dist

from costs.parameters import num_parameters
from costs.summary import flops_per_token
from costs.units import CannotRecord
from errors import UserError
from model.experts import Experts
from model.router import router_class
from parallel.axes import MeshSizes
from parallel.pipeline.balance import even_split, imbalance
from runtime.files import write_or_warn
from runtime.listener import Run
from runtime.output import log
from runtime.start.attention import describe_attention
from runtime.start.environment import local_world
from runtime.start.host import CONNECTIONS, advised_connections
from settings.config import SECTIONS, Config
from settings.data_stages import DataStage, data_stage_of, data_stages
from settings.load import changed_between, dump_config, load_saved
from training.learning_rate import learning_rate

# Sections that do not change what is trained.
ABOUT_THE_RUN = ("run", "checkpoint")


def announce(run: Run, whole: Config, spares: dict[str, int]) -> None:
    """Begin the start in the run's log, write config.yaml, and log what is to be trained, how and
    from where. Called by every rank, once the state has been loaded. `whole`: the configuration of
    the whole run; `spares`: node → number of its ranks that wait."""
    config, start, mesh = run.config, run.start, run.train.mesh
    resumed = None if start.weights_only else start.path
    about = run.log.start(start.step, dist.get_world_size(), resumed)
    if spares:
        run.log.event("spares", step=start.step, ranks=spares)
    if dist.get_rank() != 0:
        return
    folder = Path(config.run.dir)
    about += notices(whole, start.path, start.step)  # reads the last config.yaml
    write_or_warn(folder / "config.yaml", dump_config(whole))
    about += [f"{num_parameters(config.model):,} parameters on {mesh.describe()}"]
    about += [describe_nodes(mesh.sizes, local_world(dist.get_world_size()))]
    try:
        flops_per_token(config.model, config.train.seq_len)
        about += [describe_stages(config)] if config.parallel.num_stages > 1 else []
    except CannotRecord as error:
        about += [f"warning: no MFU: {error}"]
    about += [describe_attention(config, mesh.device)]
    value, advised = os.environ.get(CONNECTIONS), advised_connections(config.parallel)
    if mesh.device == "cuda" and value != str(advised):
        why = "chosen for data stage 0, or " if run.data_stage.number else ""
        why += "as it was set"  # by a site's module, for example
        about += [f"warning: {CONNECTIONS} is {value}, {why}; usually {advised} is faster"]
    begins = f"starting from {start.path or 'initial weights'} at step {start.step}"
    log("\n".join([*about, f"{begins}; run folder {folder}"]), sys.stdout)
    if whole.data_stages:
        announce_data_stage(run, data_stages(whole))


def announce_data_stage(run: Run, stages: list[DataStage]) -> None:
    """Log and record that a data stage begins, with what changes: `train.seq_len 8192 → 131072`."""
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


def notices(config: Config, path: Path | None, step: int = 0) -> list[str]:
    """The lines for the log, before the run's own config.yaml is replaced. `path`: the checkpoint
    that this start continues from, at `step`, or whose weights it begins with, if any."""
    found, model = [*config.model.doubts(), *config.optimizer.doubts()], config.model
    if (experts := model.find(Experts)) is not None and not (
        experts.router_aux_weight or router_class(model.router).bias_rate(model)
    ):
        found.append(
            "nothing keeps the load of experts even: model.experts.router_aux_weight is 0, and no "
            "router has a bias that follows it (model.sigmoid_bias.bias_rate)"
        )
    for stage in data_stages(config):
        if stage.phase.start == stage.steps.start:  # else it is in the phase of the one before
            where = f"data_stages.{stage.number}." if stage.number else ""
            found += [where + doubt for doubt in _doubts_of_phase(stage)]
    if config.checkpoint.interval == "never":
        found.append("checkpoint.interval is never: the run saves only when stopped or asked")
    changed = what_changed(path.resolve(), config, step) if path is not None else []
    return changed + [f"warning: {doubt}" for doubt in found]


def what_changed(path: Path, config: Config, step: int) -> list[str]:
    """At most one line, `changed since …: train.steps 400 → 110`: the settings at step `step` that
    differ from those of the last start of the run folder that holds the checkpoint `path`, this
    run's or another's; and what they make of the learning rate."""
    folder = path.parent.parent
    try:
        before = load_saved(folder)
        was, now = (data_stage_of(data_stages(each), step) for each in (before, config))
    except UserError as error:  # a copy, made by a tool, or an older version's
        why = str(error).partition("\n")[0]
        return [f"what changed since {path} was saved is not known: {why}"]
    training = [section for section in SECTIONS if section not in ABOUT_THE_RUN]
    changes = changed_between(was.config, now.config, training)
    changes += ["data_stages"] if before.data_stages != config.data_stages else []
    if 0 < step < config.train.steps:
        both = [learning_rate(step, each.phase, each.config.optimizer) for each in (was, now)]
        rates = [f"{rate:.3g}" for rate in both]
        if rates[0] != rates[1]:
            changes.append(f"so the learning rate of step {step + 1} {' → '.join(rates)}")
    return [f"changed since the last start of {folder}: {', '.join(changes)}"] if changes else []


def _doubts_of_phase(stage: DataStage) -> list[str]:
    """About the learning rate of a phase."""
    optimizer, steps, found = stage.config.optimizer, len(stage.phase), []
    if not optimizer.lr:
        return ["optimizer.lr is 0: no weight changes"]
    if 0 < steps <= optimizer.warmup_steps:
        found.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is not less than the {steps} steps: "
            "the learning rate rises until the end"
        )
    if (shrinks := optimizer.lr * optimizer.weight_decay) > 1:
        found.append(
            f"optimizer.lr · optimizer.weight_decay is {shrinks:g}: above 1, each step turns the "
            "sign of every weight"
        )
    return found


# --- the layout -----------------------------------------------------------------------------------


def describe_nodes(sizes: MeshSizes, ranks_per_node: int) -> str:
    """Describe in one line how much of each axis is inside a node and how much between nodes; axes
    of size 1 are left out. A second line warns if groups of tp span nodes.

    torchrun gives each node consecutive ranks, so a node holds as many consecutive positions in the
    order of the mesh (parallel/axes.py): `inside a node of 8 ranks: tp 8; between nodes: pp 4`.
    """
    inside, between, room = [], [], ranks_per_node
    for name, size in reversed(sizes.by_axis().items()):  # innermost first
        if size == 1:
            continue
        here = math.gcd(size, room)
        if here not in (size, room):
            here = 1  # a group would straddle nodes unevenly
        room = room // here if here == size else 1
        inside += [f"{name} {here}"] if here > 1 else []
        between += [f"{name} {size // here}"] if here < size else []
    if not between:
        return f"all {ranks_per_node} ranks in one node"
    near, far = ", ".join(inside) or "nothing", ", ".join(between[::-1])
    said = f"inside a node of {ranks_per_node} ranks: {near}; between nodes: {far}"
    if sizes.ep > 1:  # a group of ep is consecutive ranks, of the axes above
        said += f"; ep {sizes.ep} {'between nodes' if ranks_per_node % sizes.ep else 'inside'}"
    if ranks_per_node % sizes.tp:
        fits = [size for size in range(1, ranks_per_node + 1) if ranks_per_node % size == 0]
        said += f"\nwarning: parallel.tp={sizes.tp} spans nodes: every layer waits for the network"
        said += f"; choose parallel.tp from {fits}"
    return said


def describe_stages(config: Config) -> str:
    """Describe how the blocks are split into stages, for the log: `4 stages of 8, 9, 9, 6 blocks:
    the slowest rank computes 5% more than the mean (even split: 19%)`."""
    costs = config.layer_costs()
    split = [len(layers) for layers in config.split_layers()]
    even = even_split(config.model.num_layers, len(split))
    ranks = config.parallel.ranks_of_stages
    over, over_even = (imbalance(s, costs, ranks) - 1 for s in (split, even))
    each = len(set(split)) == 1
    blocks = f"{split[0]} blocks each" if each else f"{', '.join(map(str, split))} blocks"
    beside = "" if split == even else f" (even split: {over_even:.0%})"
    said = f"{len(split)} stages of {blocks}: the slowest rank computes {over:.0%} more"
    return f"{said} than the mean{beside}"
