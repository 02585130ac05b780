"""Train a Llama-style transformer in 3D parallel: the whole program, top to bottom.

    torchrun --nproc-per-node N train.py CONFIG.yaml [section.key=value ...]
    python train.py CONFIG.yaml [section.key=value ...]                          (one process)

configuration → mesh → data → model → optimizer → loop. Every rank runs this same file.
"""

import os
import sys

from runtime.output import guard_output
from runtime.signals import Signals

# First: the imports below take seconds, during which a signal must not kill the process.
if __name__ == "__main__":
    guard_output()
    listening = Signals(speaks=(os.environ.get("RANK") or "0") == "0").listen()

import torch.distributed as dist

from data.loader import BatchLoader
from errors import UserError
from parallel.mesh import build_mesh
from runtime.agreement import on_all_ranks
from runtime.all_listeners import build_listeners
from runtime.checkpoint.history import passed
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.load import find_start, load
from runtime.exit import fail, refuse
from runtime.listener import Listeners, Run
from runtime.log.run_log import RunLog
from runtime.monitor.rank_0 import Monitor
from runtime.start.announce import announce
from runtime.start.checks import Data, check_config, check_writable, open_same_data, try_config
from runtime.start.elastic import training_ranks
from runtime.start.environment import check_environment
from runtime.start.host import set_connections
from runtime.start.init import init_distributed, join_again, limit_waits
from runtime.start.timing import mark
from runtime.stop import StopRequests
from runtime.trainer_state import Start
from runtime.watchdog import Watchdog
from settings.config import Config
from settings.data_stages import data_stages
from training.build import build_stages
from training.step import TrainStep


def main(arguments: list[str], signals: Signals, store: dist.Store | None = None) -> None:
    """Run one rank from start to end. `store`: where the ranks find each other; None: the store
    that torchrun's environment variables describe."""
    mark("import")
    try:
        check_environment()
        told = try_config(arguments)
        ranks = training_ranks(told, signals, store)  # spares wait in it, and exit
        set_connections(told)  # before CUDA is used
        device = init_distributed(signals, ranks.store)
    except UserError as error:
        refuse(error)
    mark("join")
    try:
        config = on_all_ranks(lambda: check_config(told, device))
        start_run(config, device, signals, ranks.spares)
    except UserError as error:
        refuse(error, bool(ranks.spares))
    except Exception as error:
        fail(error, signals, bool(ranks.spares))
    ranks.leave(signals)
    dist.destroy_process_group()


def start_run(config: Config, device: str, signals: Signals, spares: dict[str, int]) -> None:
    mark("config")
    # Find the user's mistakes before anything is built or written.
    data = open_same_data(config)
    mark("data")
    on_all_ranks(lambda: check_writable(config))
    # No other run writes to the folder; a person learns of failures from here on.
    with (
        Lease(config.run.dir) as lease,
        Monitor(config, signals) as monitor,
        RunLog(config, monitor.tell) as log,
    ):
        mark("lease")
        start = find_start(config, data.train, lease)
        mark("verify")
        while later := train_data_stage(config, device, data, start, lease, log, signals, spares):
            start, spares = later, {}  # which are announced
            join_again(signals)


def train_data_stage(
    whole: Config,
    device: str,
    data: Data,
    start: Start,
    lease: Lease,
    log: RunLog,
    signals: Signals,
    spares: dict[str, int],
) -> Start | None:
    """Train from `start` to the end of its data stage (a run without `data_stages` is one). Return
    where the next one starts, if any."""
    data_stage = data_stages(whole)[start.data_stage]
    config = data_stage.config
    sizes = config.parallel.mesh_sizes(dist.get_world_size())
    mesh = build_mesh(sizes, device, config.model.has_experts)
    train_data = data.train[data_stage.number]
    loader = BatchLoader(
        train_data,
        seq_len=config.train.seq_len,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        dp_rank=mesh.batch.rank,
        dp_size=mesh.batch.size,
        next_sample=start.state.data.next_sample,
        skipped=start.state.data.skipped,
        earlier=passed(start.state.earlier, data.train),
        prefetch=config.data.prefetch,
    )
    train = TrainStep(config, mesh, build_stages(config, mesh), train_data.bos_id, data_stage.phase)
    mark("build")
    load(train, start)
    mark("load")
    limit_waits()
    lease.check()  # loading may have taken hours; from here on the run's files are written
    watchdog, stop = Watchdog(config, log), StopRequests(config, signals)
    run = Run(data_stage, train, loader, start, log, watchdog, stop)
    # called before and after every step, in order: metrics, evaluation, saving, …
    built = build_listeners(run, whole, data, lease)  # raises before anything is written
    announce(run, whole, spares)
    with Listeners(run, built).begun() as listeners:
        while run.goes_on:
            tokens, targets = run.next_batch()
            listeners.before_step()
            run.result = train(run.step, tokens, targets)
            listeners.after_step()  # counts the step, then calls the listeners
        listeners.end()
    loader.close()
    return run.following


if __name__ == "__main__":
    main(sys.argv[1:], listening)
