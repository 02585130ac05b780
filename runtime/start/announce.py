"""What a start, or a later data stage of it, writes down before its first step."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from costs.summary import flops_per_token
from costs.units import CannotRecord
from model.transformer import num_parameters
from parallel.mesh import Mesh
from runtime.files import write_or_warn
from runtime.listener import Run
from runtime.messages import log
from runtime.start.attention import describe_attention
from runtime.start.notices import notices
from runtime.start.topology import describe_nodes, describe_places, describe_stages
from settings.config import Config
from settings.load import dump_config


def announce(run: Run, whole: Config, num_tokens: int) -> None:
    """Begin the start in the run's log, write config.yaml, and log what is to be trained, how and
    from where. Called by every rank, once the state has been loaded.

    Args:
        whole: the configuration of the whole run.
        num_tokens: of the data's tokenizer.
    """
    config, start, mesh = run.config, run.start, run.train.mesh
    about = run.log.start(start.step, dist.get_world_size())
    if dist.get_rank() != 0:
        return
    folder = Path(config.run.dir)
    about += notices(whole, start.path, mesh.device, num_tokens)  # reads the last config.yaml
    write_or_warn(folder / "config.yaml", dump_config(whole))
    about += [f"{num_parameters(config.model):,} parameters on {mesh.describe()}"]
    about += _costs(config, mesh)
    about += [describe_attention(config, mesh.device)]
    begins = f"starting from {start.path or 'initial weights'} at step {start.step}"
    log("\n".join([*about, f"{begins}; run folder {folder}"]), sys.stdout)


def _costs(config: Config, mesh: Mesh) -> list[str]:
    """Describe the layout and its costs."""
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    try:
        flops_per_token(config.model, config.train.seq_len)
        lines = [describe_places(config, mesh, ranks_per_node)]
        return lines + ([describe_stages(config)] if config.parallel.num_stages > 1 else [])
    except CannotRecord as error:
        return [describe_nodes(mesh.sizes, ranks_per_node), f"warning: no MFU: {error}"]
