"""Joining the world that a launcher describes: the first thing a rank does.

torchrun keeps one store for all starts of a run, in which processes find each other, and what the
ranks of the start before left there stays. So who comes after a failure reads addresses of the
dead, and waits for them (torch 2.13; a prefix made from TORCHELASTIC_RESTART_COUNT would not do,
for each node's agent counts for itself). Here the ranks of a start agree on a prefix that no other
start has:

    rank r  asks under a name that only it knows    →  join/3 = 9f2c…
    rank 0  answers who asks with its own new name  →  9f2c…  = 41d8…     (the dead read no answers)
    rank r  has joined 41d8…                        →  41d8…/joined += 1  (all have: rank 0 goes on)
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from uuid import uuid4

import torch
import torch.distributed as dist

from runtime import signals
from runtime.signals import Signals

WAIT_SECONDS = 1.0  # at a time, for another rank
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def init_distributed(signals: Signals | None = None, store: dist.Store | None = None) -> str:
    """Join the world that the launcher describes, or be a world of one; returns the device type,
    "cuda" or "cpu".

    Args:
        signals: what this process has heard; with one in hand it does not wait forever for the
            others.
        store: where the ranks find each other; torchrun's, or one of this process, where none is
            given.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # gloo for what lives on the host: offloaded tensors, the planning of checkpoints
        backend = "cpu:gloo,cuda:nccl"
    else:
        share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1))))
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        stay_on_this_machine()
    if store is None:
        store = next(dist.rendezvous("env://"))[0] if "RANK" in os.environ else dist.HashStore()
    heard = signals.heard if signals is not None else {}
    dist.init_process_group(
        backend, store=fresh_store(store, rank, world_size, heard), rank=rank, world_size=world_size
    )
    return device


def stay_on_this_machine() -> None:
    """All ranks are here: gloo and NCCL listen on the loopback interface, closed to outsiders."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    for library in ("GLOO", "NCCL"):
        if loopback is not None:
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)


def share_cores(processes: int) -> None:
    """Settings for `processes` of this machine that compute on its cores. They cost nothing where
    one has them to itself."""
    if processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the processes share the cores already
    # glibc gives the memory of activations back to the kernel, and every step pays for fresh pages:
    # a tenth of its CPU time.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not on macOS, not with musl
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
    # A rank that gets a message does not interrupt one that computes; warm caches: 5 % (Linux).
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        # threads that are begun later have it too
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def fresh_store(
    store: dist.Store, rank: int, world_size: int, heard: Mapping[int, float] = MappingProxyType({})
) -> dist.Store:
    """The part of `store` that belongs to this start of all ranks, whatever earlier ones left."""
    mine = uuid4().hex
    patience = _Patience(heard)
    if rank > 0:
        store.set(f"join/{rank}", mine)
        while not _comes(store, mine):
            patience.look()
        start = store.get(mine).decode()
        store.add(f"{start}/joined", 1)
        return dist.PrefixStore(start, store)
    answered: set[bytes] = set()
    while store.add(f"{mine}/joined", 0) < world_size - 1:
        for asking in (f"join/{other}" for other in range(1, world_size)):
            if store.check([asking]) and (name := store.get(asking)) not in answered:
                store.set(name.decode(), mine)
                answered.add(name)
        time.sleep(0.01)
        patience.look()
    return dist.PrefixStore(mine, store)


def _comes(store: dist.Store, name: str) -> bool:
    """Whether somebody sets `name` within WAIT_SECONDS; the waiting is done by the store."""
    try:
        store.wait([name], timedelta(seconds=WAIT_SECONDS))
    except RuntimeError:  # a TCPStore's is a DistStoreError, a FileStore's is not
        # Of a store that is lost, `check` says so.
        return bool(store.check([name]))
    return True


class _Patience:
    """Waits for others, not forever with a signal in hand: torchrun sends SIGTERM if one died."""

    def __init__(self, heard: Mapping[int, float]) -> None:
        self.heard, self.began = heard, time.monotonic()

    def look(self) -> None:
        if not self.heard:
            return
        since = max(self.began, min(self.heard.values()))
        if time.monotonic() - since > signals.PATIENCE_SECONDS:
            names = ", ".join(signal.Signals(number).name for number in self.heard)
            sys.exit(
                f"{names} was received, and not all ranks came within {signals.PATIENCE_SECONDS} s"
            )
