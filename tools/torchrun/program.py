"""The process from which ranks are forked: imports train.py and all that it imports.

Only Python's fork server imports this module (__main__.py). It must start no thread and use no
GPU: a process that has done so cannot be forked.
"""

import gc
import os
import signal
import time

# The first use of DTensor would import the one in each rank, and torchrun's start of it the other.
import torch._dynamo
import torch.distributed.run  # noqa: F401

import train  # noqa: F401
from runtime import signals

# What stops all processes must not end this one: torchrun would take the ranks for dead while they
# save. It ends with the agent. (Python's fork server ignores SIGINT.)
_STOPS = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
_HANDLERS = {number: signal.signal(number, lambda *_: None) for number in _STOPS}


def _begin_rank() -> None:
    signals.STARTED = time.monotonic()
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)


# Frozen, because collections in the ranks would write to the pages of imported modules, which are
# shared. The fork server itself unfreezes: objects that are frozen at exit look like leaks.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze, after_in_child=_begin_rank)
