"""Collects Python's garbage in the same step on all ranks.

By default Python looks for unreachable cycles whenever a thread has created enough objects. Ranks
do not create the same number, so each stops at another moment, and all others wait for it in their
next collective. Here automatic collection is off during a run, and all ranks collect together,
between two steps. torchtitan does so every 50 steps (`gc_freq`), and Megatron-LM has
`--manual-gc-interval`.

What exists when the run begins (300,000 objects of imported modules, the model) is frozen, so that
a collection looks only at what the run has created since. Most objects are freed at once when
their last reference is dropped; only those in cycles wait for a collection.
"""

import gc

from runtime.listener import Listener, Run


class GarbageCollection(Listener):
    """Collects every run.gc_interval steps; every rank has one."""

    def __init__(self) -> None:
        # tools.launch has frozen the modules before it forked the ranks; leave them so
        self.freezes = gc.get_freeze_count() == 0

    def begins(self, run: Run) -> None:
        gc.collect()
        gc.disable()
        if self.freezes:
            gc.freeze()

    def after_step(self, run: Run) -> None:
        if run.is_due(run.config.run.gc_interval):
            gc.collect()

    def closes(self, run: Run, error: BaseException | None) -> None:
        if self.freezes:
            gc.unfreeze()
        gc.enable()
