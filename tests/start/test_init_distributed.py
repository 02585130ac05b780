"""The ranks of one start find each other, whatever keys earlier starts left in the store; and what
the environment says of them is checked."""

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from errors import UserError
from runtime import signals
from runtime.agreement import from_rank_0
from runtime.checkpoint.lease import Holder
from runtime.exit import this_rank
from runtime.start import init
from runtime.start.environment import OF_JOB, OF_RANK, TEXTS, check_environment
from runtime.start.init import fresh_store

WORLD = 4


def join_as(store: dist.TCPStore, rank: int, heard: Sequence[int] = ()) -> dist.Store:
    """`fresh_store` over the rank's own connection, with the signals `heard` already received."""
    own = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=60))
    return fresh_store(own, rank, WORLD, dict.fromkeys(heard, time.monotonic()))


def joined(store: dist.TCPStore) -> list[dist.Store]:
    """The store that each rank of a start gets; the ranks join in reverse order."""
    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(lambda rank: join_as(store, rank), reversed(range(WORLD))))


@pytest.fixture
def store() -> dist.TCPStore:
    minute = timedelta(seconds=60)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=minute)


def test_a_start_sees_nothing_of_those_before(store):
    """Also if one was not complete: ranks 0 and 1 died while they waited for the others."""
    joined(store)[0].set("address", "old")
    with patch.object(signals, "PATIENCE_SECONDS", 0.3), ThreadPoolExecutor(2) as pool:
        dead = [pool.submit(join_as, store, rank, [signal.SIGTERM]) for rank in (0, 1)]
        assert isinstance(dead[0].exception(), SystemExit)
        assert "not all ranks joined" in str(dead[0].exception())
    stores = joined(store)
    assert not any(each.check(["address"]) for each in stores), "a key of a previous start"
    stores[0].set("address", "new")
    assert {each.get("address") for each in stores} == {b"new"}


def test_ranks_that_never_join_are_named(store):
    """One may hang in an import: after half an hour, all others end, so that the launcher tries
    again."""
    soon = patch.multiple(init, JOIN_SECONDS=0.4, WAIT_SECONDS=0.1)
    with soon, ThreadPoolExecutor(2) as pool:
        rank_0, rank_2 = [pool.submit(join_as, store, rank) for rank in (0, 2)]
        said = str(rank_0.exception())
        assert isinstance(rank_2.exception(), SystemExit | type(None))  # it may have its answer
    assert said == f"{init.NOT_JOINED}; nothing was heard of ranks [1, 3]"


def test_who_is_late_is_waited_for(tmp_path):
    """Patience is short only after a signal. tools.launch uses a file store, which raises its own
    exception on a timeout."""

    def join(rank: int) -> dist.Store:
        return fresh_store(dist.FileStore(str(tmp_path / "store"), 2), rank, 2, {})

    with (
        patch.object(init, "WAIT_SECONDS", 0.05),
        patch.object(signals, "PATIENCE_SECONDS", 0.0),
        ThreadPoolExecutor(1) as pool,
    ):
        early = pool.submit(join, 1)
        time.sleep(0.2)
        assert not early.done(), "it waits"
        join(0).set("key", "value")
    assert early.result().get("key") == b"value"


def test_nccl_waits_ten_minutes_in_every_group(monkeypatch):
    """Those of a mesh too; gloo keeps its 30 minutes beside it, and in groups of its own, for
    saving. gloo does here what NCCL does for tensors on GPUs."""
    given = []

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
        given.append(timeout)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def timeouts(group: dist.ProcessGroup) -> list[timedelta]:
        devices = torch.device("cpu"), torch.device("cuda")
        return [group._get_backend(device).options._timeout for device in devices]

    dist.Backend.register_backend("as_nccl", create, devices=["cuda"])
    monkeypatch.setitem(init.BACKENDS, "cuda", "cpu:gloo,cuda:as_nccl")
    monkeypatch.setattr(init, "use_gpu", Mock())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert init.init_distributed(store=dist.HashStore()) == "cuda"
    try:
        init.use_gpu.assert_called_once_with(3, 0, 8)  # GPU, rank, ranks of this machine
        of_mesh, saving = dist.new_group([0]), dist.new_group([0], backend="gloo")
        ten, thirty = timedelta(minutes=10), timedelta(minutes=30)
        assert given == [thirty, thirty]  # what torch does
        init.limit_waits()
        assert timeouts(dist.group.WORLD) == timeouts(of_mesh) == [thirty, ten]
        assert timeouts(saving) == [thirty, thirty]
        # Ranks agree over gloo, as reading a checkpoint may take longer: NCCL has no GPU here.
        assert from_rank_0(lambda: "read") == "read"
    finally:
        dist.destroy_process_group()


TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    for name in (*OF_RANK, *OF_JOB, *TEXTS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        ({**TWO, "RANK": "x"}, "RANK"),
        ({**TWO, "RANK": "2"}, "RANK"),
        ({**TWO, "WORLD_SIZE": "٢"}, "WORLD_SIZE"),
        ({**TWO, "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE"),
        ({**TWO, "MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),  # each would wait for the other forever
        ({"SLURM_RESTART_COUNT": "1x"}, "SLURM_RESTART_COUNT"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "33"}, "CUDA_DEVICE_MAX_CONNECTIONS"),
    ],
)
def test_a_wrong_variable_is_refused(environment, variables, key):
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(UserError) as refused:
        check_environment()
    assert refused.value.key == key
    assert this_rank() in (0, 2), "which reports it"


def test_an_empty_variable_is_none(environment):
    for name in (*OF_RANK, *OF_JOB, *TEXTS):
        environment.setenv(name, " ")
    check_environment()
    assert not os.environ.keys() & {*OF_RANK, *OF_JOB, *TEXTS}
    assert Holder.this_process("").restart == 0
    for name, value in {**TWO, "SLURM_RESTART_COUNT": "3", "SLURM_JOB_ID": "7"}.items():  # control
        environment.setenv(name, value)
    check_environment()
    assert (this_rank(), Holder.this_process("").restart) == (0, 3)
    # what is the same for all ranks is reported by one; a launcher is no rank
    environment.setenv("SLURM_RESTART_COUNT", "x")
    environment.setenv("RANK", "1")
    check_environment()
    environment.setenv("RANK", "x")
    with pytest.raises(UserError, match="SLURM_RESTART_COUNT"):
        check_environment(is_rank=False)


def test_a_process_without_a_launcher_opens_no_port_to_others(environment):
    names = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    for name in names:
        environment.setenv(name, "")  # as unset, and unset again afterwards
    environment.setattr(torch.cuda, "is_available", lambda: False)
    environment.setattr(torch.cuda, "device_count", lambda: 0)
    environment.setattr(init, "share_cores", Mock())
    init.init_distributed(store=dist.HashStore())
    dist.destroy_process_group()
    assert {os.environ.get(name, "")[:2] for name in names} == {"lo"}


@pytest.mark.parametrize(
    ("works", "rank", "restarts", "raised"),
    [(False, "0", "0", SystemExit), (True, "7", "1", SystemExit), (True, "7", "0", UserError)],
)
def test_a_gpu_that_was_lost_is_no_mistake_of_the_user(environment, works, rank, restarts, raised):
    """The job begins anew then, elsewhere. And the CPU does not take over."""
    environment.setattr(torch.cuda, "is_available", lambda: works)
    environment.setattr(torch.cuda, "device_count", lambda: 7)
    environment.setenv("LOCAL_RANK", rank)
    environment.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    with pytest.raises(raised, match="7 GPUs"):
        init.init_distributed(store=dist.HashStore())


def test_no_gpu_is_left_but_the_driver(environment):
    """A node has lost all its GPUs between two starts. One without restarts, or whose GPUs a person
    has hidden, trains on the CPU."""
    environment.setattr(torch.cuda, "is_available", lambda: False)
    environment.setattr(torch.cuda, "device_count", lambda: 0)
    environment.setattr(torch.version, "cuda", "13.0")
    environment.setattr(os.path, "exists", lambda path: path == "/proc/driver/nvidia/version")
    environment.setattr(init, "share_cores", Mock(side_effect=InterruptedError))  # goes on
    environment.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for restarts, raised in (("0", InterruptedError), ("3", SystemExit)):
        environment.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        with pytest.raises(raised, match=r"driver is loaded.*set CUDA_VISIBLE_DEVICES=|^$"):
            init.init_distributed(store=dist.HashStore())
    environment.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InterruptedError):
        init.init_distributed(store=dist.HashStore())
