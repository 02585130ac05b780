"""A pool of ready processes that run a function as `world` ranks of a new process group.

Starting processes and importing torch takes seconds; a distributed computation on a small model
takes a tenth of a second. So a server process imports torch once and forks the ranks, which run one
task after another, each in a new process group (gloo, bound to the loopback interface, with
rendezvous through a file). Hundreds of layouts are then checked in minutes.

    with Ranks(8) as ranks:
        results = ranks.run(function, 4, *arguments)  # a list of what 4 ranks returned

`function` must be importable by name (not a lambda), and arguments and results must be picklable.
When a rank fails or a task times out, the other ranks may wait in a collective forever, so all
ranks of the task are killed, and the next task that needs them forks new ones. Ranks that had no
part in the task are kept, because a new rank takes a second to import and cache what they have.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# The server imports these before it forks; each rank must import any other module itself.
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "sympy",
    "safetensors.torch",
    "proofs.parity.run",
    "train",
]
GRACE_SECONDS = 3.0  # for other ranks to report too, after one has failed
REAP_SECONDS = 60.0  # for a process to end after it has closed its pipe


class RankError(RuntimeError):
    """A task failed on some rank; the message contains every traceback received."""


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """A pool of up to `size` processes.

    Args:
        size: the largest world size.
        timeout: seconds that one task may take.
        backend: "gloo"; or "strict" or "strict_shared", which order communication as NCCL does
            (proofs/strict).
    """

    def __init__(self, size: int = 8, timeout: float = 600.0, backend: str = "gloo") -> None:
        self.size, self.timeout, self.backend = size, timeout, backend
        # Forked by a server, not by this process: autograd does not run in a fork of a process
        # that has used it.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        # rank → its process, and this side's end of its pipe
        self._ranks: dict[int, tuple[Any, Connection]] = {}
        atexit.register(self.close)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
        """Runs function(*arguments) on `world` ranks in a new process group; returns their results.

        Raises:
            RankError: a rank raised, died or did not answer in time.
        """
        if world > self.size:
            raise ValueError(f"a world of {world} from a pool of {self.size} ranks")
        self._fork(world)
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            task = pickle.dumps(
                (function, arguments, world, str(Path(folder) / "store"), self.backend)
            )
            for rank in range(world):
                with contextlib.suppress(ConnectionError):  # it has died: `_collect` says so
                    self._ranks[rank][1].send_bytes(task)
            answers, failures = self._collect(world)
        if failures:
            self._kill(world)
            raise RankError(
                "\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures))
            )
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        """Kills this pool's processes; the next `run` forks new ones."""
        self._kill(self.size)

    def _kill(self, world: int) -> None:
        """Kills ranks 0 to `world` - 1."""
        killed = [self._ranks.pop(rank) for rank in range(world) if rank in self._ranks]
        for process, _ in killed:
            process.kill()
        for process, pipe in killed:
            process.join()
            pipe.close()

    def _fork(self, world: int) -> None:
        """Starts those of ranks 0 to `world` - 1 that are not running."""
        for rank in set(range(world)) - self._ranks.keys():
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, self.size, theirs), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._ranks[rank] = process, ours

    def _collect(self, world: int) -> tuple[dict[int, Any], dict[int, str]]:
        """Receives the answers: (rank → result, rank → reason of its failure)."""
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {self._ranks[rank][1]: rank for rank in range(world)}
        deadline = time.monotonic() + self.timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    failures[rank] = "no answer" if failures else f"no answer in {self.timeout} s"
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    process, _ = self._ranks[rank]
                    process.join(REAP_SECONDS)
                    succeeded, value = False, f"died with exit code {process.exitcode}"
                if succeeded:
                    answers[rank] = value
                else:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    failures[rank] = value
        return answers, failures


def _serve(rank: int, pool_size: int, pipe: Connection) -> None:
    """Runs one task after another as this rank, until it is killed or its parent has exited."""
    import torch
    import torch.distributed as dist

    from proofs.strict import group as strict  # registers the backend
    from runtime import signals
    from runtime.start import host, init

    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # whatever that says
    host.stay_on_this_machine()
    host.share_cores(pool_size)
    torch.set_num_threads(1)  # whatever OMP_NUM_THREADS says
    gc.freeze()  # imported modules are permanent, so later collections skip them
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments, world, store, backend = pickle.loads(task)
            signals.STARTED = time.monotonic()  # a task is a start; the process may be old
            dist.init_process_group(
                backend,
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=300),
            )
            result = pickle.dumps((True, function(*arguments)))
            dist.barrier()  # no rank may tear its connections down while another still uses them
            dist.destroy_process_group()
            strict.close()
            init.forget_meshes()
            # process groups are in reference cycles, and keep three threads each until collected
            gc.collect()
        except BaseException:  # of any kind: it is reported to the parent
            result = pickle.dumps((False, traceback.format_exc()))
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(result)
