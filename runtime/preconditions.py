"""What must hold before a run begins: checked on one rank, before anything is built or written."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from data.dataset import Mixture, open_data
from data.loader import heldout_batches
from errors import UserError
from model.transformer import num_parameters
from training.config import Config
from training.optimizers import state_bytes

# Models are published with rows that no token uses (Qwen3: 151,936 for 151,669 tokens); more of
# them are a wrong tokenizer.
MAX_PADDING = 1.01
LONGEST_NAME = 200  # bytes, and more than the longest path that a run makes in its folder


def check_fits(config: Config, device: str) -> None:
    """Raises UserError where weights and optimizer states are more than a rank's share of the
    memory: what is certain, before anything is allocated. (What else a step needs, `tools.plan`
    says.)"""
    parallel, world = config.parallel, dist.get_world_size()
    needed = num_parameters(config.model) * state_bytes(config) * parallel.dp_replicate / world
    if device == "cuda" and not parallel.cpu_offload:
        memory = torch.cuda.get_device_properties().total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory //= int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if needed > memory:
        why = f"weights and optimizer states are {needed / 1e9:,.1f} GB of each rank, which has "
        why += f"{memory / 1e9:,.1f} GB"
        remedy = "use more processes (parallel.dp_shard, tp, pp) or a smaller model; "
        remedy += "`python -m tools.plan` says what fits"
        raise UserError("model", f"{num_parameters(config.model):,} parameters", why, remedy)


def open_train_and_heldout(config: Config) -> tuple[Mixture, Mixture | None]:
    """Both splits (only the first without evaluation), long enough for the sequence length, with
    the model's tokens."""
    data = open_data(config.data, "train")
    heldout = open_data(config.data, "heldout") if config.train.eval_interval else None
    if not data.vocab_size <= config.model.vocab_size <= data.vocab_size * MAX_PADDING:
        why = f"the data's tokenizer has {data.vocab_size} tokens"
        remedy = f"set model.vocab_size={data.vocab_size}"
        raise UserError("model.vocab_size", config.model.vocab_size, why, remedy)
    if not data.tokenizer_path.is_file():  # checkpoints take it along
        path, why = str(data.tokenizer_path), "the data's tokenizer is missing"
        raise UserError("data.path", path, why, "prepare the data again")
    for split in filter(None, (data, heldout)):  # a split too short for one sequence says so here
        options = {"num_samples": 1, "dp_rank": 0, "dp_size": 1, "rows": 1}
        next(heldout_batches(split, seq_len=config.train.seq_len, **options))
    return data, heldout


def check_writable(config: Config) -> None:
    """The run folder is made later; what it will be made in must let us."""
    folder = Path(config.run.dir).absolute()
    remedy = "choose another, or its permissions"
    try:
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        with tempfile.TemporaryFile(dir=existing):  # not os.access: to root /proc is writable
            pass
        names = [len(os.fsencode(name)) for name in (*folder.parts, "x" * LONGEST_NAME)]
        limits = os.pathconf(existing, "PC_NAME_MAX"), os.pathconf(existing, "PC_PATH_MAX")
    except OSError as error:
        why = f"{existing} is not a writable folder ({error.strerror})"
        raise UserError("run.dir", config.run.dir, why, remedy) from None
    if max(names) > limits[0] or sum(names) + len(names) > limits[1]:
        why = "is longer than the file system allows"
        raise UserError("run.dir", config.run.dir, why, "choose a shorter one")
