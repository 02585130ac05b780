"""A view of the launcher's store that only the ranks of one start use.

torchrun uses one rendezvous store for all starts of a run and never clears it. After a restart, a
rank would read the addresses of dead processes there and wait for them (torch 2.13). A prefix made
from TORCHELASTIC_RESTART_COUNT does not help, because each node's agent counts separately. So the
ranks of each start agree on a prefix that no other start has:

    rank r  posts a random name of its own       →  join/3 = 9f2c…
    rank 0  answers each name with the prefix    →  9f2c…  = 41d8…      (dead ranks never read it)
    rank r  confirms that it has joined          →  41d8…/joined += 1   (rank 0 waits for all)
"""

import signal
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from uuid import uuid4

import torch.distributed as dist

from runtime import signals

WAIT_SECONDS = 1.0  # timeout of one wait for another rank; waits are repeated
# for all ranks to join: thousands may import the program from one file system; but one that hangs
# there would keep the others forever
JOIN_SECONDS = 1800.0
NOT_JOINED = "not all ranks joined in the time that is allowed for it"


def fresh_store(
    store: dist.Store, rank: int, world_size: int, heard: Mapping[int, float] = MappingProxyType({})
) -> dist.Store:
    """Return a view of `store` that only this start's ranks use; see the module docstring.

    heard: signals received so far, as in `Signals.heard`.
    """
    mine = uuid4().hex
    patience = Patience(heard)
    if rank > 0:
        store.set(f"join/{rank}", mine)
        while not comes(store, mine):
            patience.look()
        start = store.get(mine).decode()
        store.add(f"{start}/joined", 1)
        return dist.PrefixStore(start, store)
    answered: set[bytes] = set()
    while store.add(f"{mine}/joined", 0) < world_size - 1:
        for other in range(1, world_size):
            asking = f"join/{other}"
            if store.check([asking]) and (name := store.get(asking)) not in answered:
                store.set(name.decode(), mine)
                answered.add(name)
        time.sleep(0.01)
        if patience.is_over:
            others = range(1, world_size)  # in this start or an earlier one
            unheard = [other for other in others if not store.check([f"join/{other}"])]
            of = f"; nothing was heard of ranks {unheard[:20]}" if unheard else ""
            sys.exit(NOT_JOINED + of)
        patience.look()
    return dist.PrefixStore(mine, store)


def comes(store: dist.Store, name: str) -> bool:
    """Whether `name` is set within WAIT_SECONDS; blocks in the store, without polling."""
    try:
        store.wait([name], timedelta(seconds=WAIT_SECONDS))
    except RuntimeError:  # a timeout; a FileStore raises no more specific error
        # If the store itself is lost, `check` raises.
        return bool(store.check([name]))
    return True


class Patience:
    """Limits the wait for other ranks, much more once a signal was received: torchrun sends SIGTERM
    when a rank has died."""

    def __init__(self, heard: Mapping[int, float]) -> None:
        self.heard, self.began = heard, time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began > JOIN_SECONDS

    def look(self) -> None:
        """Exit if the time is over."""
        if self.is_over:
            sys.exit(NOT_JOINED)
        if not self.heard:
            return
        since = max(self.began, min(self.heard.values()))
        if time.monotonic() - since > signals.PATIENCE_SECONDS:
            names = ", ".join(signal.Signals(number).name for number in self.heard)
            sys.exit(
                f"{names} was received, and not all ranks joined in {signals.PATIENCE_SECONDS} s"
            )
