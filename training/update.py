"""The optimizer's update of all weights of a rank."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

from torch import Tensor

from parallel.disk import DiskMemory, ranges_of_size
from parallel.parameter import NamedWeight
from parallel.placement import shards_of
from settings.config import Config
from training.optimizers import ShardedOptimizer, bytes_of_states, optimizer_class

# of the states in a file, unless a single weight has more; but at most about MOST files
GROUP_BYTES, MOST = 256 << 20, 64


class Update:
    """Holds an optimizer for each group of `weights`, the sharded ones of this rank, and their
    states. (There are several groups only with parallel.offload=disk.)"""

    def __init__(self, weights: Sequence[NamedWeight], config: Config) -> None:
        kind = optimizer_class(config.optimizer.name)
        groups = groups_of(kind, weights) if config.parallel.offload == "disk" else [weights]
        self.weights, self.states_of = weights, kind.states_of
        self.groups = [kind(group, config) for group in groups]
        self.updates = self.groups[0].updates  # made so far
        self.states = [states for group in self.groups for states in group.states]
        files = [group.file for group in self.groups if group.file is not None]
        self.traffic = Traffic(files) if files else None

    def set_updates(self, updates: int) -> None:
        for group in self.groups:
            group.updates.fill_(updates)

    def wait(self) -> None:
        """Wait until a disk has what the last step has changed. Raises OSError."""
        if self.traffic:
            self.traffic.wait()

    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """Update every weight (the arguments are those of `ShardedOptimizer.update`), and free the
        gradients. Raises OSError if a disk fails."""
        norm = norm.to(self.updates.device)  # if offloaded from a GPU, the host waits for it here
        for number, group in enumerate(self.groups):
            with self.traffic.using(number) if self.traffic else nullcontext():
                group.step(lr, norm, max_norm)


def group_bytes(total: float) -> float:
    """About how many bytes of states a group has, of `total` on the rank."""
    return max(GROUP_BYTES, total / MOST)


def groups_of(
    kind: type[ShardedOptimizer], weights: Sequence[NamedWeight]
) -> Iterator[Sequence[NamedWeight]]:
    """Divide weights, in their order, by the size of their states; into the same groups on all
    ranks that have parts of them, because an optimizer may communicate."""
    sizes = []
    for weight in weights:
        states, master = kind.states_of(weight.spec), weight.sharded.element_size()
        whole = bytes_of_states(states, weight.spec.shape, master)
        sizes.append(whole / shards_of(weight.sharded))
    for part in ranges_of_size(sizes, group_bytes(sum(sizes))):
        yield weights[part.start : part.stop]


class Traffic:
    """Reads files ahead of their use, in a cycle, and writes them behind it. An error of a read or
    a write is raised where the file is needed next.

    With parallel.offload=disk the weights are updated in groups, and the states of each group are
    in a file (parallel/disk.py). While one group is updated, the one before it is written and the
    one after it is read, as in ZeRO-Infinity (Rajbhandari et al. 2021,
    https://arxiv.org/abs/2104.07857, section 5.2):

        file     ▐ group 0 ▐ group 1 ▐ group 2 ▐ group 3 ▐ …
                     ▲ write             │ read ahead
        memory   ▐ group 0 ▐ group 1 ▐ group 2 ▐
                             updated

    At most three groups are in memory. The first group of the next update is read at once: during
    the forwards and backwards before it.
    """

    def __init__(self, files: Sequence[DiskMemory]) -> None:
        self.files = files
        self.reader, self.writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.reads: dict[int, Future[None]] = {}  # begun, and not used yet
        self.writes: dict[int, Future[None]] = {}  # the last of each

    @contextmanager
    def using(self, number: int) -> Iterator[None]:
        """Wait until a file is in memory, and begin to read the next one; afterwards begin to write
        it. Raises OSError."""
        self._read_ahead(number)
        self._read_ahead(number + 1)
        self.reads.pop(number).result()
        yield
        self.writes[number] = self.writer.submit(self.files[number].write)
        self._read_ahead(number + 1)  # if it is the only one

    def wait(self) -> None:
        """Wait until all that was changed is written. Raises OSError."""
        for write in self.writes.values():
            write.result()

    def _read_ahead(self, number: int) -> None:
        number %= len(self.files)
        if number not in self.reads:
            self.reads[number] = self.reader.submit(self._read, number)

    def _read(self, number: int) -> None:
        # the third one before: so at most three are in memory
        for before in (number, (number - 3) % len(self.files)):
            if before in self.writes:
                self.writes[before].result()
        self.files[number].read()
