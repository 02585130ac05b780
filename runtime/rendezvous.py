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
from collections.abc import Mapping, Set
from datetime import timedelta
from types import MappingProxyType
from uuid import uuid4

import torch.distributed as dist

from runtime import signals

WAIT_SECONDS = 1.0  # timeout of one wait for another rank; waits are repeated
# for all ranks to join: thousands may import the program from one file system; but one that hangs
# there would keep the others forever
JOIN_SECONDS = 1800.0


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
    heard_of: set[int] = set()  # now or in an earlier start
    while store.add(f"{mine}/joined", 0) < world_size - 1:
        for other in range(1, world_size):
            asking = f"join/{other}"
            if store.check([asking]) and (name := store.get(asking)) not in answered:
                store.set(name.decode(), mine)
                answered.add(name)
                heard_of.add(other)
        time.sleep(0.01)
        patience.look(set(range(1, world_size)) - heard_of)
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

    def look(self, missing: Set[int] = frozenset()) -> None:
        """Exit if the time is over. `missing`: ranks of which nothing was heard."""
        if time.monotonic() - self.began > JOIN_SECONDS:
            of = f"; nothing was heard of ranks {sorted(missing)[:20]}" if missing else ""
            sys.exit(f"not all ranks joined in {JOIN_SECONDS / 60:.0f} minutes{of}")
        if not self.heard:
            return
        since = max(self.began, min(self.heard.values()))
        if time.monotonic() - since > signals.PATIENCE_SECONDS:
            names = ", ".join(signal.Signals(number).name for number in self.heard)
            sys.exit(
                f"{names} was received, and not all ranks joined in {signals.PATIENCE_SECONDS} s"
            )
