"""The optimizer's update of all weights of a rank. With parallel.offload=disk the weights are
updated in groups, and the states of each group are in a file (parallel/disk.py). While one group is
updated, the disk works for two others, as in ZeRO-Infinity (Rajbhandari et al. 2021,
https://arxiv.org/abs/2104.07857, section 5.2):

    file     ▐ group 0 ▐ group 1 ▐ group 2 ▐ group 3 ▐ …
                 ▲ write             │ read ahead
    memory   ▐ group 0 ▐ group 1 ▐ group 2 ▐
                         updated

At most three groups are in memory. The first group of the next update is read at once: during the
forwards and backwards before it.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from parallel.disk import DiskMemory
from parallel.parameter import NamedWeight
from settings.config import Config
from training.optimizers import ShardedOptimizer, optimizer_class

GROUP_BYTES = 256 << 20  # of the states in a file, unless a single weight has more


class Update:
    """Holds an optimizer for each group of weights, and their states.

    Args:
        weights: this rank's sharded weights.
        config: the configuration of the run.
    """

    def __init__(self, weights: Sequence[NamedWeight], config: Config) -> None:
        kind = optimizer_class(config.optimizer.name)
        groups = in_files(kind, weights) if config.parallel.offload == "disk" else [weights]
        self.weights, self.states_of = weights, kind.states_of
        self.groups = [kind(group, config) for group in groups]
        self.states = [states for group in self.groups for states in group.states]
        files = [group.file for group in self.groups if group.file is not None]
        self.traffic = Traffic(files) if files else None

    @property
    def updates(self) -> Tensor:
        """The number of updates made so far: a float32 scalar on the device of the states."""
        return self.groups[0].updates

    def set_updates(self, updates: int) -> None:
        for group in self.groups:
            group.set_updates(updates)

    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """Update every weight, and free the gradients (`ShardedOptimizer.update` has the
        arguments). Raises OSError if a disk fails."""
        norm = norm.to(self.updates.device)  # if offloaded from a GPU, the host waits for it here
        for number, group in enumerate(self.groups):
            if self.traffic:
                self.traffic.begin(number)
            group.step(lr, norm, max_norm)
            if self.traffic:
                self.traffic.end(number)


def in_files(
    kind: type[ShardedOptimizer], weights: Sequence[NamedWeight]
) -> Iterator[list[NamedWeight]]:
    """Divide weights, in their order, into groups whose states have about GROUP_BYTES."""
    group: list[NamedWeight] = []
    size = 0
    for weight in weights:
        needed = kind.file_bytes(weight)
        if group and size + needed > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(weight)
        size += needed
    if group:
        yield group


class Traffic:
    """Reads files ahead of their use, in a cycle, and writes them behind it."""

    def __init__(self, files: Sequence[DiskMemory]) -> None:
        self.files = files
        self.reader, self.writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.reads: dict[int, Future[None]] = {}  # begun, and not used yet
        self.writes: dict[int, Future[None]] = {}  # the last of each

    def begin(self, number: int) -> None:
        """Wait until a file is in memory, and begin to read the next one. Raises OSError."""
        self._read_ahead(number)
        self._read_ahead(number + 1)
        self.reads.pop(number).result()

    def end(self, number: int) -> None:
        """Begin to write a file that has been changed."""
        self.writes[number] = self.writer.submit(self.files[number].write)
        self._read_ahead(number + 1)

    def _read_ahead(self, number: int) -> None:
        number %= len(self.files)
        if number not in self.reads:
            self.reads[number] = self.reader.submit(self._read, number)

    def _read(self, number: int) -> None:
        # the one before last: so at most three are in memory
        for before in (number, (number - 2) % len(self.files)):
            if before in self.writes:
                self.writes[before].result()
        self.files[number].read()
