"""Small but complete training runs on the ranks of the tests' pool."""

import contextlib
import errno
import io
import json
import multiprocessing
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

import proofs.ranks
import train
from errors import UserError
from proofs.ranks import RankError, Ranks
from runtime.agreement import on_all_ranks
from runtime.checkpoint.folder import complete_checkpoints
from runtime.checkpoint.folder import step_of as step_of_checkpoint
from runtime.checkpoint.load import load
from runtime.checkpoint.manifest import MANIFEST
from runtime.checkpoint.save import SaveFailed
from runtime.checkpoint.tensor_files import PLACES
from runtime.checkpoint.verify import parse_trainer
from runtime.log.events import read_events
from runtime.log.run_log import RunLog
from runtime.signals import Signals
from runtime.start.checks import check_config, try_config
from runtime.trainer_state import Start, held_tensors
from settings.load import load_config
from tests import ROOT
from tests.data_samples import tokenizer
from tests.steps import make_step
from training.step import TrainStep

STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # of a file server, for a moment
FIXTURE = ROOT / "tests/fixtures" / "step-00000002"  # of an earlier version: pp 2 × tp 2, two steps
LAYOUT_3D = {"tp": 2, "pp": 2}  # and, on 8 ranks, dp_shard 2
# for the section `model`: a dense layer, then layers of 4 experts with biases
EXPERTS = {
    "router": "sigmoid_bias",
    "sigmoid_bias": {"bias_rate": 1e-3},  # with 1e-2 each step undoes the one before
    "experts": {
        **{"num_dense_layers": 1, "count": 4, "per_token": 2, "ffn_dim": 16},
        **{"num_shared": 1, "router_aux_weight": 1e-3, "router_z_weight": 1e-3},
    },
}


def write_config(folder: Path, data: Path, /, **sections: dict[str, Any]) -> str:
    """Write the configuration of a small run to `folder` and return its path: 4 layers, batches of
    8 sequences of 32 tokens, micro-batches of 2 sequences, run folder `folder`/run."""
    raw: dict[str, dict[str, Any]] = {
        "model": {"dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64,
                  "vocab_size": tokenizer().vocab_size},
        "parallel": {},
        "train": {"steps": 6, "seq_len": 32, "global_batch_size": 8, "micro_batch_size": 2,
                  "dtype": "float32"},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "data": {"path": str(data)},
        "checkpoint": {"interval": "never"},
        "run": {"dir": str(folder / "run")},
    }  # fmt: skip
    for section, values in sections.items():
        raw.setdefault(section, {}).update(values)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


def run_log_of(folder: Path, sink: Callable[[dict[str, Any]], None] | None = None) -> RunLog:
    """The log of a run that has this folder; nothing is trained."""
    return RunLog(load_config("configs/laptop.yaml", [f"run.dir={folder}"]), sink)


def train_run(arguments: list[str]) -> str:
    """Do what `train.py` does, in the existing process group. Return the message of a UserError, or
    the empty string."""
    warnings.simplefilter("ignore")
    try:
        config = on_all_ranks(lambda: check_config(try_config(arguments), "cpu"))
        with Signals(speaks=dist.get_rank() == 0) as signals:
            train.start_run(config, "cpu", signals, {})
    except UserError as error:
        return str(error)
    return ""


def run(ranks: Ranks, world: int, *arguments: str) -> None:
    """Train until the run has ended; nothing may be refused."""
    assert ranks.run(train_run, world, list(arguments)) == [""] * world


def heard(arguments: list[str], stream: str = "stderr") -> tuple[str, str]:
    """Train; return why the run was refused or its last save failed (else the empty string), and
    what this rank wrote to standard error, or to `stream`."""
    said = io.StringIO()
    with patch.object(sys, stream, said):
        try:
            why = train_run(arguments)
        except SaveFailed as failed:
            why = str(failed)
    return why, said.getvalue()


def messages(cases: dict[str, list[str]]) -> dict[str, str]:
    """The message of `train_run` for one case after another, in the same process group: refused
    runs that need no start of their own."""
    return {name: train_run(arguments) for name, arguments in cases.items()}


def said_by(function: Callable[..., str], *arguments: Any) -> str:
    """What `function` returns, or the error by which it fails on every rank. (A task that raises
    costs new ranks.)"""
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def dies(said: str | None = None) -> Iterator[pytest.ExceptionInfo[RankError]]:
    """Expect that a rank dies, and do not wait for the others, which may wait for it."""
    with (
        patch.object(proofs.ranks, "GRACE_SECONDS", 0.5),
        pytest.raises(RankError, match=said) as e,
    ):
        yield e


def _write_to(log: Path, errors: Path, function: Callable[..., None], *arguments: Any) -> None:
    for descriptor, path in ((1, log), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    function(*arguments)


def forked(
    log: Path, function: Callable[..., None], *arguments: Any, errors: Path | None = None
) -> Any:
    """Run a function in a process of its own, which has already imported torch: forked like ranks
    (proofs/ranks.py), in two seconds less than a new one takes. Its output goes to `log`, standard
    error to `errors`, if that is given."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(proofs.ranks.PRELOAD)
    about = (log, errors or log, function, *arguments)
    process = context.Process(target=_write_to, args=about)
    process.start()
    return process


def status(process: Any) -> int | None:
    """The exit status of a forked process, once it has ended."""
    process.join(300)
    return process.exitcode


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The logged steps of the run in `folder`/run."""
    text = (folder / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of this kind of the run whose folder this is."""
    return [event for event in read_events(folder) if event["event"] == kind]


def status_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "status.json").read_text())


def losses(folder: Path) -> dict[int, float]:
    """Step → loss of the run in `folder`/run."""
    lines = metrics_of(folder)
    found = {line["step"]: line["loss"] for line in lines}
    assert len(found) == len(lines), "a step was written twice"
    return found


def evaluations(folder: Path) -> dict[int, float]:
    """Step → held-out loss."""
    return {line["step"]: line["eval_loss"] for line in metrics_of(folder) if "eval_loss" in line}


def saved_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints of the run in `folder`/run."""
    return [step_of_checkpoint(path) for path in complete_checkpoints(folder / "run/checkpoints")]


def trainer_of(folder: Path, step: int) -> dict[str, Any]:
    """The trainer.json of a checkpoint of the run in `folder`/run."""
    return json.loads((checkpoint_of(folder, step) / "trainer.json").read_text())


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "run" / "checkpoints" / f"step-{step:08d}"


def stored_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The global tensors of a checkpoint, assembled without the code under test."""
    whole: dict[str, torch.Tensor] = {}
    entries = json.loads((checkpoint / MANIFEST).read_text())["tensors"]
    for path in sorted(checkpoint.glob("*.safetensors")):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        where = json.loads(header["__metadata__"][PLACES])
        for name, piece in load_file(path).items():
            empty = torch.full(entries[name]["shape"], torch.nan, dtype=piece.dtype)
            places = zip(where[name]["saved_offsets"], piece.shape, strict=True)
            whole.setdefault(name, empty)[tuple(slice(at, at + n) for at, n in places)] = piece
    return whole


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether these are the same names and numbers, bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def step_of(arguments: list[str]) -> TrainStep:
    """The training step of a configuration, on the ranks of this process group."""
    warnings.simplefilter("ignore")
    return make_step(load_config(arguments[0], arguments[1:]))


def saved_start(path: Path, **about: bool) -> Start:
    """A start from the state of a checkpoint."""
    return Start(parse_trainer(path), path, **about)


def global_state(
    arguments: list[str], path: str, weights_only: bool = False
) -> dict[str, torch.Tensor]:
    """Load the checkpoint `path`, or only its weights, in this layout and return every global
    tensor (weights, biases of routers and optimizer moments), gathered from all ranks."""
    step = step_of(arguments)
    load(step, saved_start(Path(path), weights_only=weights_only))
    mine: dict[str, torch.Tensor] = {}
    for held in held_tensors(step):
        mine[held.name] = held.tensor.full_tensor().clone()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, torch.Tensor] = {}
    for part in everyone:
        for name, tensor in part.items():
            first = whole.setdefault(name, tensor)
            assert torch.equal(first, tensor), f"{name} differs by rank"
    return whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(run: Path) -> dict[str, bytes]:
    """The content of every file of a run folder but the lease, which each start takes."""
    files = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "lease"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def fresh(folder: Path) -> None:
    shutil.rmtree(folder / "run", ignore_errors=True)


def forget_last(folder: Path) -> None:
    """Delete the newest checkpoint, as if the run had died before it."""
    shutil.rmtree(max((folder / "run" / "checkpoints").glob("step-*")))


def copy_of(saved: Path, folder: Path) -> tuple[str, Path]:
    """Copy the run in `saved` (configured by `write_config`) to `folder`; return the copy's
    configuration file and its checkpoint folder."""
    shutil.copytree(saved / "run", folder / "run")
    config = (saved / "config.yaml").read_text().replace(str(saved / "run"), str(folder / "run"))
    (folder / "config.yaml").write_text(config)
    return str(folder / "config.yaml"), folder / "run" / "checkpoints"
