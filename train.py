"""Train a Llama-style transformer in 3D parallel: the whole program, top to bottom.

    torchrun --nproc-per-node N train.py CONFIG.yaml [section.key=value ...]      (or: python train.py CONFIG.yaml ...)

configuration → mesh → data → model → optimizer → loop. Every rank runs this same file.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

from runtime.signals import Signals

# first of all: the other imports take seconds, in which a signal must not kill
if __name__ == "__main__":
    listening = Signals(speaks=os.environ.get("RANK", "0") == "0").listen()

import torch
import torch.distributed as dist

from data.dataset import Mixture, open_data
from data.loader import BatchLoader, heldout_batches
from errors import UserError
from model.kernels.backend import check_kernels
from parallel.mesh import Mesh, build_mesh
from runtime import checkpoint
from runtime.init_distributed import init_distributed
from runtime.lease import Lease
from runtime.memory_report import MemoryReports
from runtime.messages import fail, on_all_ranks, refuse
from runtime.metrics import Metrics
from runtime.profile import StepProfile
from runtime.replicas import check_replicas
from runtime.rollback import Rollback
from runtime.save import Saver
from runtime.stop import StopRequests
from runtime.trace import StepTrace
from runtime.watchdog import Watchdog
from training.build import build_stages, check_fits
from training.config import Config
from training.guard import check_not_in_vain
from training.learning_rate import learning_rate
from training.load_config import load_config
from training.optimizers import check_optimizer
from training.step import TrainStep

# Models are published with rows that no token uses (Qwen3: 151,936 for 151,669 tokens); more of
# them are a wrong tokenizer.
MAX_PADDING = 1.01
LONGEST_NAME = 200  # bytes, and more than the longest path that a run makes in its folder


def main(arguments: list[str], signals: Signals, store: dist.Store | None = None) -> None:
    """A rank's life. `store`: where it finds the others, if the launcher that torchrun describes
    has none."""
    device = init_distributed(signals, store)
    try:
        config = on_all_ranks(lambda: read_config(arguments, device), device)
        run(config, device, signals)
    except UserError as error:
        refuse(error)
    except Exception as error:
        fail(error, signals)
    dist.destroy_process_group()


def read_config(arguments: list[str], device: str) -> Config:
    if not arguments:
        raise UserError(
            "command line",
            "",
            "names no configuration file",
            "torchrun … train.py configs/laptop.yaml",
        )
    config = load_config(arguments[0], arguments[1:])
    config.validate(dist.get_world_size())
    check_kernels(config.model.kernels, device)
    check_optimizer(config)
    check_fits(config, device)
    return config


def run(config: Config, device: str, signals: Signals) -> None:
    if config.train.deterministic:
        # cuBLAS asks for it, and reads it at its first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    mesh = build_mesh(config.parallel.mesh_sizes(dist.get_world_size()), device)

    # What the user may have got wrong is found before anything is built or written.
    train_data, heldout_data = on_all_ranks(lambda: open_train_and_heldout(config), device)
    on_all_ranks(lambda: check_writable(config), device)
    with Lease(config.run.dir, device) as lease:  # no other run writes to the folder
        train_and_save(config, mesh, train_data, heldout_data, lease, signals)


def train_and_save(
    config: Config,
    mesh: Mesh,
    train_data: Mixture,
    heldout_data: Mixture,
    lease: Lease,
    signals: Signals,
) -> None:
    start = checkpoint.find_start(config, train_data, lease)
    loader = BatchLoader(
        train_data,
        seq_len=config.train.seq_len,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        next_sample=start.next_sample,
        skipped=start.skipped,
        prefetch=config.data.prefetch,
    )

    train = TrainStep(config, mesh, build_stages(config, mesh), train_data.bos_id)
    checkpoint.load(train, start)
    saver = Saver(train, train_data.tokenizer_path, lease)
    trace = StepTrace(config, mesh, start.step)
    rollback = Rollback(config, train_data, start, lease)

    lease.check()  # loading may have taken hours; from here on metrics are written
    with (
        StopRequests(config, signals) as stop,
        Metrics(config, mesh, start) as metrics,
        Watchdog(config) as watchdog,
        StepProfile(config, mesh, watchdog) as profile,
        MemoryReports(train, start.step) as memory,
    ):
        step = start.step  # steps made
        save_due = False  # stays while steps are bad
        while step < config.train.steps and not stop.agreed:
            rollback.begins_step(loader)
            waiting = time.perf_counter()
            tokens, targets = next(loader)
            metrics.waited_for_data(time.perf_counter() - waiting)

            with trace.around(train, step), profile.around(step):
                result = train(step, tokens, targets)

            lr = learning_rate(step, config.train.steps, config.optimizer)
            step += 1
            metrics.step_done(step, lr, result)
            watchdog.step_done(step, metrics.step_seconds)
            memory.step_done(step)
            if is_due(config.train.eval_interval, step, config):
                with metrics.spending("evaluation"):
                    assert heldout_data is not None
                    metrics.evaluated(step, evaluate(train, heldout_data, stop, watchdog))
            lease.check()
            metrics.flush()
            stop.agree()
            if rollback.is_due(metrics.bad_in_a_row) and not stop.agreed:
                with metrics.spending("rollback"), watchdog.resting():
                    back = rollback.go_back(step, metrics.bad_in_a_row, train, saver, loader)
                    step, save_due = back.step, False
                    metrics.went_back(back)
                continue
            if step == config.train.steps:
                check_not_in_vain(step, step - start.step, metrics.bad_in_a_row)
            save_due = save_due or is_due(config.checkpoint.interval, step, config)
            if save_due or stop.wants_save or is_due(config.guard.replica_interval, step, config):
                with metrics.spending("saving"), watchdog.resting():
                    check_replicas(train)
                    good = not train.guard.bad_in_a_row or step == config.train.steps
                    if stop.wants_save or (save_due and good):
                        saver.save(step, metrics.tokens, loader.state())
                        save_due = False
                        stop.saved()
                        # what was asked during the save is known to all before the next step begins
                        stop.agree()
        with watchdog.resting():
            saver.close()
        lease.check()
        if stop.agreed:
            metrics.stopped(stop.reason)
        else:
            metrics.summarise(train_data.unigram_nats_per_token)
    loader.close()


def open_train_and_heldout(config: Config) -> tuple[Mixture, Mixture | None]:
    """Both splits (only the first without evaluation), long enough for the sequence length, with
    the model's tokens."""
    data = open_data(config.data, "train")
    heldout = open_data(config.data, "heldout") if config.train.eval_interval else None
    if not data.vocab_size <= config.model.vocab_size <= data.vocab_size * MAX_PADDING:
        why = f"the data's tokenizer has {data.vocab_size} tokens"
        raise UserError(
            "model.vocab_size",
            config.model.vocab_size,
            why,
            f"set model.vocab_size={data.vocab_size}",
        )
    if not data.tokenizer_path.is_file():  # checkpoints take it along
        raise UserError(
            "data.path",
            str(data.tokenizer_path),
            "the data's tokenizer is missing",
            "prepare the data again",
        )
    for split in filter(None, (data, heldout)):  # a split too short for one sequence says so here
        next(
            heldout_batches(
                split, seq_len=config.train.seq_len, num_samples=1, dp_rank=0, dp_size=1, rows=1
            )
        )
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
        raise UserError(
            "run.dir",
            config.run.dir,
            "is longer than the file system allows",
            "choose a shorter one",
        )


def is_due(interval: int, step: int, config: Config) -> bool:
    """After every `interval` steps and after the last one; never if `interval` is 0. `step` steps
    are made."""
    return interval > 0 and (step % interval == 0 or step == config.train.steps)


def evaluate(
    train: TrainStep, heldout: Mixture, stop: StopRequests, watchdog: Watchdog
) -> float | None:
    """Mean loss in nats per target token over the first train.eval_samples held-out sequences: the
    same on every layout. None if a stop is agreed on before the end."""
    config, mesh = train.config, train.mesh
    size = config.train.micro_batch_size
    microbatches = min(
        config.num_microbatches(mesh.dp_size),
        -(-config.train.eval_samples // (mesh.dp_size * size)),
    )
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # loss, target tokens
    for tokens, targets in heldout_batches(
        heldout,
        seq_len=config.train.seq_len,
        num_samples=config.train.eval_samples,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        rows=size * microbatches,
    ):
        if stop.agree():
            return None
        total += torch.stack([value.double() for value in train.evaluate(tokens, targets)])
        watchdog.beat()
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    main(sys.argv[1:], listening)
