"""Checks before a run begins, while nothing has been built or written yet."""

import functools
import hashlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from costs.parameters import num_parameters
from data.dataset import Mixture, TokenDataset, check_same_tokenizer, open_data
from data.loader import heldout_batches
from errors import UserError, raise_passing
from model.kernels.backend import check_kernels
from parallel.disk import DiskMemory
from runtime.agreement import from_rank_0, on_all_ranks
from runtime.device import check_gpu, prepare_determinism
from runtime.evaluation.rows import Task, open_tasks
from runtime.exit import this_rank
from runtime.monitor.check import check_alerts
from runtime.start.attention import describe_attention
from runtime.start.environment import local_world
from runtime.trainer_state import bytes_of_rank
from settings.config import Config
from settings.data_stages import data_stages, in_data_stage
from settings.layouts import layout_sizes, valid_layout
from settings.load import load_config

REMOTE = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "wekafs"}


def try_config(arguments: list[str]) -> Config | UserError:
    """Read the configuration of a run, once on each rank. What is wrong with it is returned: the
    ranks first join, so that one of them can report it.

    arguments: a configuration file, then section.key=value overrides.
    """
    if not arguments or arguments[0].startswith("-"):
        remedy = "train.py configs/laptop.yaml [section.key=value …]; docs/running.md has the keys"
        given = arguments[0] if arguments else ""
        return UserError("command line", given, "no configuration file is given", remedy)
    try:
        config = load_config(arguments[0], arguments[1:])
        layout_sizes(config)  # raises if a layout is wrong
        return config
    except UserError as error:
        return error


def check_config(told: Config | UserError, device: str) -> Config:
    """Check what `try_config` has read, once the ranks have joined. Returns the configuration with
    the layout for their number; raises UserError."""
    if isinstance(told, UserError):
        raise told
    config, _ = valid_layout(told, dist.get_world_size())
    check_gpu(config.train.dtype, device)
    check_kernels(config.model.kernels, device)
    prepare_determinism(device, config.train.deterministic)
    for stage in data_stages(config):
        describe_attention(stage.config, device)  # raises if the wanted kernel cannot run
        check_fits(stage.config, device)
    return config


def file_system_of(folder: str) -> str:
    """The type of the file system that a folder is on, on Linux."""
    number, found = os.stat(folder).st_dev, ""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        about, _, source = line.partition(" - ")
        if about.split()[2] == f"{os.major(number)}:{os.minor(number)}":
            found = source.split()[0]
    return found


def check_fits(config: Config, device: str) -> None:
    """Raise UserError if weights and optimizer states exceed a rank's share of the memory: such a
    run is certain to fail. (`tools.plan` estimates what else a step needs. Space on a disk is
    reserved when the run is built: parallel/disk.py.)"""
    parallel, world = config.parallel, dist.get_world_size()
    if parallel.offload == "disk":
        if sys.platform != "linux":
            raise UserError("parallel.offload", "disk", "needs Linux", "use parallel.offload=host")
        DiskMemory(parallel.offload_dir, 0)  # raises if it is no writable folder
        if (kind := file_system_of(parallel.offload_dir)) in REMOTE:
            why = f"is on {kind}, which other machines share: every update would cross the network"
            remedy = "give a folder on a local disk"
            raise UserError("parallel.offload_dir", parallel.offload_dir, why, remedy)
        return
    needed = bytes_of_rank(config, world)
    if device == "cuda" and parallel.offload == "none":
        memory = torch.cuda.get_device_properties().total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world(world)
    if needed > memory:
        why = f"weights and optimizer states need {needed / 1e9:,.1f} GB on each rank, which has "
        why += f"{memory / 1e9:,.1f} GB"
        remedy = "use more processes (parallel.dp_shard, tp, pp), parallel.offload=disk or a "
        remedy += "smaller model; `python -m tools.plan` shows what fits"
        raise UserError("model", f"{num_parameters(config.model):,} parameters", why, remedy)


def open_train_and_heldout(
    config: Config, open_one: Callable[..., TokenDataset] = TokenDataset.open
) -> tuple[Mixture, Mixture | None]:
    """Open the training split and, if evaluation is on, the held-out split; each folder with
    `open_one`. Raises UserError if the vocabulary does not fit the model, the tokenizer is not the
    data's, or a split is shorter than one sequence."""
    data = open_data(config.data, "train", open_one)
    wanted = config.train.eval_interval
    heldout = open_data(config.data, "heldout", open_one) if wanted else None
    if config.model.vocab_size < data.vocab_size:
        why = f"the data's tokenizer has {data.vocab_size} tokens"
        remedy = f"set model.vocab_size={data.vocab_size}, or if the model exists already, prepare "
        remedy += "the data with its tokenizer"
        raise UserError("model.vocab_size", config.model.vocab_size, why, remedy)
    if this_rank() == 0:  # which adds a copy to each checkpoint
        data.read_tokenizer()  # raises if it is not the data's
    for split in filter(None, (data, heldout)):  # raises if a split is too short for one sequence
        options = {"num_samples": 1, "dp_rank": 0, "dp_size": 1, "rows": 1}
        next(heldout_batches(split, seq_len=config.train.seq_len, **options))
    return data, heldout


@dataclass(frozen=True)
class Data:
    """The data of each data stage of a run: to train on, held out (None: no evaluation), and the
    tasks to evaluate on."""

    train: list[Mixture] = field(default_factory=list)
    heldout: list[Mixture | None] = field(default_factory=list)
    tasks: list[list[Task]] = field(default_factory=list)

    def identity(self) -> str:
        """The same on two ranks if all that they have read is."""
        splits = [split and split.checksum for split in (*self.train, *self.heldout)]
        return hashlib.sha256(repr((splits, self.tasks)).encode()).hexdigest()


def open_same_data(config: Config) -> Data:
    """Open the data of each data stage on every rank. Raises UserError, on every rank, if one has
    other data than rank 0 (a node has an older copy): stages of the pipeline would take tokens and
    targets from different texts, and nothing would show it."""
    data = on_all_ranks(lambda: open_data_stages(config))
    first = from_rank_0(data.identity)

    def compared() -> Data:
        if data.identity() == first:
            return data
        why = f"on {socket.gethostname()} it, or the files of train.tasks, are not rank 0's"
        remedy = "give folders that all nodes share, or copy them to each node again"
        raise UserError("data.path", config.data.path, why, remedy)

    return on_all_ranks(compared)


def open_data_stages(config: Config) -> Data:
    """Open the data of each data stage. Raises UserError; also if a task cannot be evaluated, or
    their tokenizers differ."""
    found, open_once = Data(), functools.cache(TokenDataset.open)  # data stages share folders
    for stage in data_stages(config):
        with in_data_stage(stage.number):
            train, heldout = open_train_and_heldout(stage.config, open_once)
            found.train.append(train)
            found.heldout.append(heldout)
            found.tasks.append(open_tasks(stage.config, train.tokenizer_path))
            remedy = "prepare the data of all data stages with the same tokenizer"
            check_same_tokenizer([found.train[0].sources[0], train.sources[0]], remedy)
    return found


def check_writable(config: Config) -> None:
    """Raise UserError if the run folder cannot be created or written (it is created later), or if
    rank 0 could not send alarms."""
    folder = Path(config.run.dir).absolute()
    try:
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        # os.access would not do: it reports /proc as writable to root
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise_passing(error)
        why = f"{existing} is not a writable folder ({error.strerror})"
        remedy = "choose another folder, or change its permissions"
        raise UserError("run.dir", config.run.dir, why, remedy) from None
    if not dist.is_initialized() or dist.get_rank() == 0:  # the preflight has no ranks
        check_alerts(config)
