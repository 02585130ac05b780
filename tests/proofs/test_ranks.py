"""The pool of ranks (proofs/ranks.py) gives each task a fresh process group, reports failures, and
leaves no state of one task to the next."""

import os
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


def test_worlds_of_any_size_share_the_processes(ranks):
    four, two = ranks.run(sum_of_ranks, 4, 0), ranks.run(sum_of_ranks, 2, 10)
    assert [result[:2] for result in four] == [(6, 0), (6, 1), (6, 2), (6, 3)]
    assert [result[:2] for result in two] == [(21, 0), (21, 1)]
    assert [pid for *_, pid in four][:2] == [pid for *_, pid in two]


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("what rank 1 says")
    dist.barrier()


def test_failure_of_one_rank_is_told_and_the_pool_recovers(ranks, monkeypatch):
    monkeypatch.setattr("proofs.ranks.GRACE_SECONDS", 0.5)
    started = time.monotonic()
    with pytest.raises(RankError, match="what rank 1 says"):
        ranks.run(fail_on_rank_one, 2)
    assert time.monotonic() - started < 30
    assert ranks.run(sum_of_ranks, 2, 0)[0][0] == 1


def die_on_rank_one():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_death_of_a_rank_is_told(ranks):
    with pytest.raises(RankError, match="rank 1: died with exit code 7"):
        ranks.run(die_on_rank_one, 2)


def sleep_long():
    time.sleep(60)


def test_timeout_kills():
    with Ranks(2, timeout=1.0) as pool:
        with pytest.raises(RankError, match="no answer in"):
            pool.run(sleep_long, 2)
        pool.timeout = 60.0
        assert pool.run(sum_of_ranks, 2, 0)[0][0] == 1


def empty_like_on_a_mesh(extra_groups):
    """Whether a DTensor made from another has the right mesh (it goes through torch's caches, which
    identify meshes by shape), and its content."""
    for _ in range(extra_groups):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    tensor = DTensor.from_local(torch.ones(2), mesh["b"], [Shard(0)], run_check=False)
    other = torch.empty_like(tensor).fill_(dist.get_rank())
    return other.device_mesh.get_group().group_name == mesh[
        "b"
    ].get_group().group_name, other.full_tensor().tolist()


def test_no_mesh_of_an_earlier_task_comes_back(ranks):
    ranks.run(empty_like_on_a_mesh, 4, 5)
    results = ranks.run(empty_like_on_a_mesh, 4, 0)
    assert all(same for same, _ in results)
    assert results[0][1] == [0, 0, 1, 1]
    assert results[3][1] == [2, 2, 3, 3]


def count_threads():
    return len(os.listdir("/proc/self/task"))


def keep_meshes():
    """Introduces a bug: the rank keeps torch's caches from one task to the next."""
    runtime.start.init.forget_meshes = lambda: None


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize("bug", [None, keep_meshes], ids=["as it is", "meshes are kept"])
def test_a_task_leaves_no_thread_of_its_groups(bug):
    """gloo's threads wake a hundred times a second, so those of a thousand groups would take all
    the processors' time."""
    with Ranks(2) as pool:
        if bug is not None:
            pool.run(bug, 2)
        before = pool.run(count_threads, 2)
        assert not check(pool, Case(MeshSizes(tp=2), num_microbatches=2)).failures()
        after = pool.run(count_threads, 2)
    assert (after == before) is (bug is None)
