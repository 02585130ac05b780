"""The pool of ranks (proofs/ranks.py) gives each task a fresh process group, reports failures, and
leaves no state of one task to the next."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import runtime.start.init
from parallel.axes import MeshSizes
from proofs.parity.cases import Case
from proofs.parity.run import check
from proofs.ranks import RankError, Ranks


def sum_of_ranks(start):
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return total.item(), dist.get_rank(), os.getpid()


def rank_one_does(what):
    """Or all do, if they sleep."""
    if what == "sleep":
        time.sleep(60)
    elif dist.get_rank() == 1 and what == "raise":
        raise ValueError("what rank 1 says")
    elif dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_failures_are_told_and_the_pool_recovers(monkeypatch):
    monkeypatch.setattr("proofs.ranks.GRACE_SECONDS", 0.1)
    with Ranks(2) as pool:
        for what, timeout, said in (
            ("raise", 60.0, "what rank 1 says"),
            ("exit", 60.0, "rank 1: died with exit code 7"),
            ("sleep", 1.0, "no answer in"),
        ):
            pool.timeout = timeout
            started = time.monotonic()
            with pytest.raises(RankError, match=said):
                pool.run(rank_one_does, 2, what)
            assert time.monotonic() - started < 30
        pool.timeout = 60.0
        answers = pool.run(sum_of_ranks, 2, 0)
        assert [answer[:2] for answer in answers] == [(1, 0), (1, 1)]
        assert pool.run(sum_of_ranks, 1, 5) == [(5, 0, answers[0][2])], "a new process"
        os.kill(answers[1][2], signal.SIGKILL)  # between two tasks
        with pytest.raises(RankError, match="rank 1: died with exit code -9"):
            pool.run(sum_of_ranks, 2, 0)
        assert pool.run(sum_of_ranks, 2, 0)[0][0] == 1


def is_on_its_mesh(extra_groups):
    """Whether a DTensor made from another has the right mesh (it goes through torch's caches, which
    identify meshes by shape)."""
    for _ in range(extra_groups):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    other = torch.empty_like(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
    return other.device_mesh.get_group().group_name == mesh.get_group().group_name


def test_no_mesh_of_an_earlier_task_comes_back(ranks):
    ranks.run(is_on_its_mesh, 4, 5)
    assert ranks.run(is_on_its_mesh, 4, 0) == [True] * 4


def count_threads():
    return len(os.listdir("/proc/self/task"))


def keep_meshes():
    """Introduces a bug: the rank keeps torch's caches from one task to the next."""
    runtime.start.init.forget_meshes = lambda: None


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_a_task_leaves_no_thread_of_its_groups():
    """gloo's threads wake a hundred times a second, so those of a thousand groups would take all
    the processors' time. Control: they stay where meshes are kept."""
    with Ranks(2) as pool:
        for bug in (None, keep_meshes):
            if bug is not None:
                pool.run(bug, 2)
            before = pool.run(count_threads, 2)
            assert not check(pool, Case(MeshSizes(tp=2), num_microbatches=2)).failures()
            assert (pool.run(count_threads, 2) == before) is (bug is None)
