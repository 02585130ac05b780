"""Every rank may open as many sockets as its groups need: the limit is raised at the start of a
run, and compared before it."""

import itertools
import os
import resource
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from proofs.ranks import Ranks
from runtime.start.host import open_files_needed, raise_open_files


def sockets() -> int:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(link.is_symlink() and "socket" in os.readlink(link) for link in links)


def sockets_of_groups(sizes: list[MeshSizes]) -> list[int]:
    """How many sockets one group of all ranks opens, and then each mesh of 8 ranks."""
    opened = [sockets()]
    dist.new_group(backend="gloo")
    opened.append(sockets())
    for each in sizes:
        build_mesh(each, "cpu")
        opened.append(sockets())
    return [after - before for before, after in itertools.pairwise(opened)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_groups_open_as_many_sockets_as_is_said(ranks: Ranks) -> None:
    """A group of all ranks opens one for each other rank and one to listen. Those of the mesh open
    no more than three such groups together."""
    meshes = [MeshSizes(pp=2, dp_shard=2, tp=2), MeshSizes(dp_shard=2, cp=2, tp=2), MeshSizes(cp=8)]
    for group, *of_meshes in ranks.run(sockets_of_groups, 8, meshes):
        assert group == 8
        assert max(of_meshes) <= 3 * group
    assert open_files_needed(8) - open_files_needed(0) == 6 * 8


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 10**6, open_files_needed(1024)),
        (1024, 4096, 4096),
        (10**5, 10**6, None),
        (1024, resource.RLIM_INFINITY, open_files_needed(1024)),
    ],
)
def test_the_limit_of_open_files_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None
) -> None:
    """To what 1,024 ranks need, or as far as the hard limit permits, which is then a problem for
    the preflight; it is never lowered."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert ("needs up to 6,656" in raise_open_files(1024)) == (hard == 4096)
    assert limits == ([(raised, hard)] if raised else [])
