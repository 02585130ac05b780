"""The process from which ranks are forked: imports train.py and all that it imports.

Only Python's fork server imports this module (__main__.py). It must start no thread and use no
GPU: a process that has done so cannot be forked.
"""

import gc
import os
import time

# The first use of DTensor would import the one in each rank, and torchrun's start of it the other.
import torch._dynamo
import torch.distributed.run  # noqa: F401

import train  # noqa: F401
from runtime import signals


def _restart_clock() -> None:
    signals.STARTED = time.monotonic()


# Frozen, because collections in the ranks would write to the pages of imported modules, which are
# shared. The fork server itself unfreezes: objects that are frozen at exit look like leaks.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze, after_in_child=_restart_clock)
