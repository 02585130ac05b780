"""A pool of ready processes that run a function as `world` ranks of a fresh process group.

Starting processes and importing torch costs seconds; a distributed computation on a small model
costs a tenth of one. So a server process imports torch once, forks the ranks, and they serve one
task after another, each in a process group of its own (gloo, bound to the loopback interface,
meeting in a file). Hundreds of layouts are then checked in minutes.

    with Ranks(8) as ranks:
        results = ranks.run(function, 4, *arguments)  # a list of what 4 ranks returned

`function` must be importable by name (not a lambda), arguments and results must pickle. When a rank
fails or a task takes too long, the others wait in a collective forever, so all ranks of the task
are killed, and the next task that needs them forks new ones. Ranks that had no part in it stay:
what they have imported and cached would cost each new one a second.
"""

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# The server imports these before it forks; what is missing here each rank imports, slowly.
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "sympy",
    "safetensors.torch",
    "tools.parity.run",
    "train",
]
_CACHED = type(functools.cache(lambda: None))  # functools has no public name for it
GRACE_SECONDS = 3.0  # for other ranks to report too, after one has failed
REAP_SECONDS = 60.0  # for a process that has closed its pipe, and so is dying


class RankError(RuntimeError):
    """A task failed on some rank; the message holds every traceback that came back."""


class Ranks:
    """`size` processes in wait for `run`.

    Args:
        size: the largest world.
        timeout: seconds one task may take.
        backend: "gloo"; or "strict" or "strict_shared", which order communication as NCCL does
            (tools/strict).
    """

    def __init__(self, size: int = 8, timeout: float = 600.0, backend: str = "gloo") -> None:
        self.size, self.timeout, self.backend = size, timeout, backend
        # A fork server and not a fork of this process: autograd refuses to run in the fork of a
        # process that has used it.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        # rank → its process and our end of its pipe
        self._ranks: dict[int, tuple[Any, Connection]] = {}
        atexit.register(self.close)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
        """function(*arguments) on `world` ranks in a process group of their own; their results.

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
                self._ranks[rank][1].send_bytes(task)
            answers, failures = self._collect(world)
        if failures:
            self._kill(world)
            raise RankError(
                "\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures))
            )
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        """Kill this pool's processes; the next `run` forks new ones."""
        self._kill(self.size)

    def _kill(self, world: int) -> None:
        """Kill ranks 0 to `world` - 1."""
        killed = [self._ranks.pop(rank) for rank in range(world) if rank in self._ranks]
        for process, _ in killed:
            process.kill()
        for process, pipe in killed:
            process.join()
            pipe.close()

    def _fork(self, world: int) -> None:
        """Start what is missing of ranks 0 to `world` - 1."""
        for rank in set(range(world)) - self._ranks.keys():
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, theirs), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._ranks[rank] = process, ours

    def _collect(self, world: int) -> tuple[dict[int, Any], dict[int, str]]:
        """Every rank's answer, and every failed rank's reason."""
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


def _serve(rank: int, pipe: Connection) -> None:
    """A rank's life: one task after another, until it is killed or its parent is gone."""
    import torch
    import torch.distributed as dist

    from tools.strict import group as strict  # registers the backend

    os.environ["GLOO_SOCKET_IFNAME"] = next(
        name for _, name in socket.if_nameindex() if name.startswith("lo")
    )
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays; collections below look at the rest alone
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments, world, store, backend = pickle.loads(task)
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
            _forget_meshes()
            # process groups are in cycles, and each keeps three threads until it is collected
            gc.collect()
        except BaseException:  # whatever it was, the parent must hear of it
            result = pickle.dumps((False, traceback.format_exc()))
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(result)


def _forget_meshes() -> None:
    """Clear torch's caches of what it knows about meshes. Meshes of one shape are equal to it, so a
    cached answer would bring back a mesh whose process groups are gone, or, under the same name,
    another's."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.") and module is not None:
            for value in list(vars(module).values()):
                if type(value) is _CACHED:
                    value.cache_clear()
