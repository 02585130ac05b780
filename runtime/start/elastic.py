"""Elastic restart: at each start, `parallel.layouts` decides how many ranks of the launcher train;
the others are spares, which wait until the run ends or the launcher stops them.

    torchrun --nnodes 1:4, 2 ranks each; layouts for 8, 6 and 4 ranks; node n2 is excluded

    launcher's rank   0  1   2  3   4  5   6  7     before: 4 nodes, none excluded: all 8 train
    node              n1     n2     n3     n4
    trains as rank    0  1   -  -   2  3   4  5     6 ranks are left: the layout for 6

All ranks first find each other in the launcher's store, before any GPU is used, and rank 0 decides.
The ranks that train get new numbers, in RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, and a store that the
first of them holds: torchrun may have put its own into the process of the launcher's rank 0, which
may be a spare, or on a node that dies. The order is the launcher's, with excluded nodes
(health/excluded.py) last, so the ranks of a node stay together. What they say in these stores:

    key        set by                          what
    node/RANK  each of the launcher's ranks    its node
    chosen     the launcher's rank 0           who trains
    address    the first rank that trains      where its own store is
    ended      it                              the run has ended, for the others that train
    leave      it                              likewise, for spares: `ended` or `stopped`;
               any rank (exit.py)              `refused`
    left       spares                          how many know; then rank 0, and its store, may exit

A spare uses no GPU and hardly any CPU. It exits with status 0 when the run has ended, or on a
signal other than SIGUSR1; with 2 when the start was refused. It does not exit before, because
torchrun's agent would then leave the rendezvous, and the node could not replace another. If the
store, which rank 0 holds, is gone or does not answer for LOST_SECONDS, it exits with status 1.

When a node returns, each node's agent sends SIGTERM to its ranks, within about a second of each
other; all ranks save and stop together (stop.py). A rank whose agent has not sent it yet waits for
it before it exits: the agent would take the end of its ranks for the end of the run (torch 2.13),
and leave.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from errors import UserError
from runtime.exit import REFUSED, stop_agent
from runtime.health.excluded import excluded_nodes, node_name
from runtime.output import log
from runtime.signals import Signals
from runtime.start.environment import local_world
from runtime.start.init import Patience, comes, fresh_store
from settings.config import Config
from settings.layouts import layout_sizes

LOOK_SECONDS = 1.0  # between two looks of a spare at the store and for signals
LOST_SECONDS = 120.0  # without an answer of the store, after which a spare gives up
ANSWER_SECONDS = 60.0  # for all ranks to name their nodes, once all have joined
AGENT_SECONDS = 10.0  # to wait for SIGTERM from this node's agent, after another's
LEFT_SECONDS = 0.2  # between two looks at whether all have joined, or rank 0 has ended
LEAVE_SECONDS = 10.0  # for the spares to answer at the end: one may be dead


def choose_ranks(nodes: Sequence[str], sizes: Sequence[int], excluded: set[str]) -> list[int]:
    """The launcher's ranks that train, in their new order.

    Args:
        nodes: the node of each of the launcher's ranks.
        sizes: the number of ranks of each layout.
        excluded: nodes that are used only if no layout fits without them.

    Returns: as many ranks as the largest layout that fits has, or the smallest if it needs excluded
        nodes; all ranks if none fits.
    """
    ranks = range(len(nodes))
    good = [rank for rank in ranks if nodes[rank] not in excluded]
    if fits := [size for size in sizes if size <= len(good)]:
        return good[: max(fits)]
    usable = [*good, *(rank for rank in ranks if nodes[rank] in excluded)]
    if fits := [size for size in sizes if size <= len(usable)]:
        return usable[: min(fits)]  # with the fewest of them
    return list(ranks)


@dataclass
class TrainingRanks:
    """The ranks that train in this start, as one of them sees them."""

    store: dist.Store | None = None  # where they find each other; None: the launcher's store
    spares: dict[str, int] = field(default_factory=dict)  # node → number of ranks that wait
    # the launcher's store; this process may hold it, so it is kept; None: the run is not elastic
    met: dist.Store | None = None

    def leave(self, signals: Signals) -> None:
        """Wait until rank 0 has ended too, and, if the run is elastic, for this node's agent to
        stop its ranks if another's has done so; let the spares go. Called by every rank that
        trains, at the end."""
        has_agents = "TORCHELASTIC_RUN_ID" in os.environ
        if self.met is None and not has_agents:
            return
        is_first, stopped = os.environ["RANK"] == "0", False
        store = self.store or dist.distributed_c10d._get_default_store()
        if is_first:
            store.set("ended", "")
        # Rank 0 may first wait an hour for checkpoint.after_commit, longer than a collective may,
        # and than the agents of nodes whose ranks have ended wait for the others: five minutes.
        # Then they leave, one of them with the store, and the agent of rank 0 would stop it.
        while not store.check(["ended"]):  # not `wait`: torch logs whenever its limit is reached
            time.sleep(LEFT_SECONDS)
        if has_agents:
            asked = torch.tensor(int(signal.SIGTERM in signals.heard))
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)  # one number, over all ranks that train
            stopped = bool(asked)
        if self.met is None:
            return
        if stopped:
            _wait_for_agent(signals)
        if is_first:
            store.set("leave", "stopped" if stopped else "ended")
            until = time.monotonic() + LEAVE_SECONDS
            num_spares = sum(self.spares.values())
            while store.add("left", 0) < num_spares and time.monotonic() < until:
                time.sleep(0.05)


def training_ranks(
    config: Config | UserError, signals: Signals, store: dist.Store | None
) -> TrainingRanks:
    """Decide together which ranks train. Returns on these only: a spare waits here and exits. Does
    nothing for a configuration without `parallel.layouts`.

    Args:
        config: if it is wrong, all ranks go on, and one reports it.
        signals: those received so far.
        store: where all ranks find each other; None: torchrun's, if there is one.
    """
    sizes = [] if isinstance(config, UserError) else layout_sizes(config)
    if not sizes or (store is None and "RANK" not in os.environ):
        return TrainingRanks(store)
    assert isinstance(config, Config)
    _leave_if_signalled(signals)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_torchruns = store is None
    met = store or next(dist.rendezvous("env://"))[0]
    store = fresh_store(met, rank, world, signals.heard)
    store.set(f"node/{rank}", node_name())
    if rank == 0:
        nodes = [_read(store, f"node/{other}", signals) for other in range(world)]
        excluded = set(excluded_nodes(Path(config.run.dir))) & set(nodes)
        chosen = choose_ranks(nodes, sizes, excluded)
        train = set(chosen)
        spares = Counter(node for number, node in enumerate(nodes) if number not in train)
        store.set("chosen", json.dumps({"ranks": chosen, "nodes": nodes, "spares": spares}))
        if used := excluded & {nodes[number] for number in chosen}:
            log(
                f"warning: too few nodes without {', '.join(sorted(used))}, which excluded.json "
                "excludes: used all the same"
            )
        if spares:
            where = ", ".join(f"{number} on {node}" for node, number in spares.items())
            log(f"{len(chosen)} of {world} ranks train; spares: {where}")
    patience = Patience(signals.heard)
    while store.add("joined", 0) < world - 1:  # see fresh_store; the last may be minutes later
        _leave_if_signalled(signals)
        patience.look()
        time.sleep(max(LEFT_SECONDS, world / 5000))  # thousands would keep the store busy
    decided = json.loads(_read(store, "chosen", signals))
    chosen = decided["ranks"]
    if is_torchruns:
        store = _store_of_first(store, chosen[0], decided["nodes"], signals)
    if rank not in chosen:
        _wait_as_spare(store, signals)
    mine = [decided["nodes"][one] for one in chosen].count(decided["nodes"][rank])
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(chosen.index(rank)), str(len(chosen))
    os.environ["LOCAL_WORLD_SIZE"] = str(min(mine, local_world(mine)))
    signals.speaks = chosen.index(rank) == 0
    return TrainingRanks(store, decided["spares"], met)


def _read(store: dist.Store, key: str, signals: Signals) -> str:
    """Wait for the value of `key`; all ranks have joined, so it comes soon."""
    until = time.monotonic() + ANSWER_SECONDS
    while not comes(store, key):
        _leave_if_signalled(signals)
        if time.monotonic() > until:
            sys.exit(f"no {key} from another rank: do all ranks read the same configuration?")
    return store.get(key).decode()


def _store_of_first(
    store: dist.Store, first: int, nodes: Sequence[str], signals: Signals
) -> dist.Store:
    """Return the store that the launcher's rank `first` holds from now on; `store`: where all ranks
    find each other."""
    if int(os.environ["RANK"]) != first:
        host, port = json.loads(_read(store, "address", signals))
        return dist.TCPStore(host, port, wait_for_workers=False)
    host = os.environ["MASTER_ADDR"]
    if nodes[first] != nodes[0]:  # this is another machine: its address in the same network
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            host = probe.getsockname()[0]
    own = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    store.set("address", json.dumps([host, own.port]))
    return own


def _leave_if_signalled(signals: Signals) -> None:
    """Exit if this rank was asked to stop: no step is done, so there is nothing to save."""
    if signals.heard:
        sys.exit(128 + min(signals.heard))


def _wait_for_agent(signals: Signals) -> None:
    """Wait for SIGTERM from this node's agent, which is about to stop its ranks."""
    until = time.monotonic() + AGENT_SECONDS
    while signal.SIGTERM not in signals.heard and time.monotonic() < until:
        time.sleep(0.05)


def _wait_as_spare(store: dist.Store, signals: Signals) -> None:
    """Wait until the run has ended; never returns."""
    signals.hush()
    view = _View(store)
    view.start()
    # The job script sends USR1 to spares, too. Those that train save first, which may take longer
    # than agents wait for each other, and this one's may hold the launcher's store.
    while view.is_alive() and not signals.heard.keys() - {signal.SIGUSR1}:
        view.join(0.2)
        if time.monotonic() - view.answered > LOST_SECONDS:
            sys.exit(f"a spare saw no sign of life of rank 0 for {LOST_SECONDS:.0f} s")
    view.asked.set()
    view.join(2 * LOOK_SECONDS)
    if view.said == REFUSED:
        stop_agent()
        sys.exit(2)
    if view.problem or view.said == "stopped":
        _wait_for_agent(signals)
    if view.problem and not signals.heard:
        sys.exit(f"a spare lost rank 0: {view.problem}")
    sys.exit(0)


class _View(threading.Thread):
    """What a spare sees of rank 0, in its store. In a thread: calls of a store whose process hangs,
    or whose machine is dead, return after minutes or never."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(name="spare", daemon=True)
        self.store, self.asked = store, threading.Event()  # asked to leave
        self.answered, self.said, self.problem = time.monotonic(), "", ""

    def run(self) -> None:
        try:
            # not `wait` with a limit: torch logs two lines whenever that is reached
            while not self.store.check(["leave"]) and not self.asked.is_set():
                self.answered = time.monotonic()
                self.asked.wait(LOOK_SECONDS)
            if self.store.check(["leave"]):
                self.said = self.store.get("leave").decode()
            self.store.add("left", 1)
        except RuntimeError as error:  # the process is gone
            self.problem = str(error).partition("\n")[0]
