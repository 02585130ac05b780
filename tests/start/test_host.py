"""What a rank sets on its host: the CPUs next to its GPU, as far as it may; its allocator; the
queues to its GPU, by the layout and before CUDA is used; and as many sockets as its groups need.
What the user has set comes first."""

import importlib
import itertools
import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call, patch

import pytest
import torch
import torch.distributed as dist

import train
from errors import UserError
from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from runtime.device import CUBLAS
from runtime.signals import Signals
from runtime.start import checks, host
from runtime.start.checks import try_config
from runtime.start.host import CONNECTIONS, open_files_needed, raise_open_files
from tests import ROOT
from tests.runs import forked, status

# --- the CPUs next to a GPU, and its allocator ----------------------------------------------------

BUSES = (0x1B, 0x3C, 0x9A, 0xBB)  # of the GPUs
NODES = {"0": "0-15,32-47\n", "1": "16-31,48-63\n", "-": "0-63\n", "x": "x", "n": "\n"}
FIRST, SECOND = {*range(16), *range(32, 48)}, {*range(16, 32), *range(48, 64)}
ALL = FIRST | SECOND


@pytest.mark.parametrize(
    ("of_gpus", "ranks", "gpu", "allowed", "cpus", "threads", "why_not"),
    [
        ("0011", 4, 0, ALL, FIRST, 16, ""),
        ("0011", 4, 3, ALL, SECOND, 16, ""),
        ("0011", 3, 2, ALL, SECOND, 32, ""),  # the last GPU has no rank
        ("0001", 4, 1, ALL, FIRST, 10, ""),
        ("-011", 4, 2, ALL, SECOND, 10, ""),  # the first may run on all CPUs
        ("0011", 8, 0, ALL, FIRST, 4, ""),  # each of 8 ranks sees 4 GPUs; who shares is not known
        # Slurm's --cpu-bind, a container or taskset has chosen some; no others are added
        ("0011", 4, 0, {*range(8, 24)}, {*range(8, 16)}, 4, ""),
        # too few are left
        ("0011", 4, 0, SECOND, SECOND, 8, "it may use 0 of these CPUs, too few"),
        ("0011", 4, 0, SECOND | {*range(7)}, SECOND | {*range(7)}, 9,
         "it may use 7 of these CPUs, too few for the 2 ranks"),
        # Linux says that all CPUs are near, or nothing: it is not taken to be on node 0
        *((f"{node}011", 4, 0, ALL, ALL, 16, "") for node in "- xn"),
    ],
)  # fmt: skip
def test_the_cpus_of_a_rank(
    tmp_path, monkeypatch, of_gpus, ranks, gpu, allowed, cpus, threads, why_not
):
    """In a pretended sysfs with the CPUs next to each GPU, those of its node (" ": no file)."""
    for bus, node in zip(BUSES, of_gpus, strict=True):
        device = tmp_path / f"bus/pci/devices/0000:{bus:02x}:00.0"
        device.mkdir(parents=True)
        if node in NODES:
            (device / "local_cpulist").write_text(NODES[node])

    def properties(gpu):
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=BUSES[gpu], pci_device_id=0)

    bound = []
    monkeypatch.setattr(host, "SYSTEM", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(BUSES))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    found, said = host.bind_to_gpu(gpu, ranks)
    assert (bound, found) == ([cpus], threads)
    assert said.startswith(why_not)
    assert bool(said) == bool(why_not)


OURS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("given", "allocator"),
    [
        ({}, OURS),
        ({"OMP_NUM_THREADS": "5"}, OURS),
        *((given, given) for given in ({name: "x:64"} for name in (*OURS, "PYTORCH_ALLOC_CONF"))),
    ],
)
def test_a_rank_is_bound_before_its_device_is_set(capsys, monkeypatch, given, allocator):
    """The device's context has threads and memory of its own. The ranks share the CPUs, unless the
    user has said how. If nothing was bound, the rank says why. And whatever the environment says,
    products of float32 are not TF32."""
    calls = Mock(**{"bind.return_value": (3, "a reason")})
    monkeypatch.setattr(host, "bind_to_gpu", calls.bind)
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    monkeypatch.setattr(torch, "set_num_threads", calls.set_num_threads)
    torch.set_float32_matmul_precision("high")  # as with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
    with patch.dict(os.environ, given, clear=True):
        host.use_gpu(3, 0, 10)
        assert {n: value for n, value in os.environ.items() if "ALLOC_CONF" in n} == allocator
        assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert torch.get_float32_matmul_precision() == "highest"
    threads = [] if "OMP_NUM_THREADS" in given else [call.set_num_threads(3)]
    assert calls.mock_calls == [call.bind(3, 10), *threads, call.set_device(3)]
    assert "rank 0 is not bound to the CPUs next to its GPU: a reason" in capsys.readouterr().err


# --- what CUDA reads at its first use -------------------------------------------------------------

CONFIG = str(ROOT / "configs/llama3_70b.yaml")  # tp 4, zero_stage 1


class CudaTouched(BaseException):
    """Raised at the first use of CUDA."""


def value_at_first_use(*arguments: str, given: str | None = None) -> str | None:
    """The variable's value when train.py's main function first uses CUDA, which ends it."""
    with (
        patch.dict(os.environ, {CONNECTIONS: given} if given else {}),
        patch.object(torch.cuda, "is_available", side_effect=CudaTouched),
    ):
        with pytest.raises(CudaTouched):
            train.main([*arguments], Signals(speaks=False))
        return os.environ.get(CONNECTIONS)


def test_the_queues_are_set_before_cuda_is_used(monkeypatch):
    monkeypatch.delenv(CONNECTIONS, raising=False)
    assert value_at_first_use(CONFIG) == "1"
    assert value_at_first_use(CONFIG, "parallel.tp=1") == "32"
    assert value_at_first_use(CONFIG, "parallel.zero_stage=2") == "32"  # reduces in each layer
    assert value_at_first_use(CONFIG, given="8") == "8", "the user's value"
    for wrong in ([], ["/nowhere"], [CONFIG, "parallel.tp=x"]):  # one rank reports it later
        assert value_at_first_use(*wrong) is None
    with patch.object(train, "set_connections"):  # control
        assert value_at_first_use(CONFIG) is None


def test_a_check_of_the_configuration_prepares_cublas(monkeypatch):
    """cuBLAS reads its variable at its first product, and flash attention's backward is
    deterministic only under torch's flag. A value with which neither holds is refused."""
    flag = torch.are_deterministic_algorithms_enabled()
    alone = ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1", "train.deterministic=true"]
    config = try_config([str(ROOT / "configs/laptop.yaml"), *alone])
    found = []

    def tried(*_):
        found.append((os.environ[CUBLAS], torch.are_deterministic_algorithms_enabled()))

    for name in ("check_gpu", "check_kernels", "check_fits"):
        monkeypatch.setattr(checks, name, lambda *_: None)
    monkeypatch.setattr(checks, "describe_attention", tried)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    try:
        with patch.dict(os.environ):
            os.environ.pop(CUBLAS, None)
            checks.check_config(config, "cuda")
        with patch.dict(os.environ, {CUBLAS: ":4096:2:16:8"}), pytest.raises(UserError) as refused:
            checks.check_config(config, "cuda")
    finally:
        torch.use_deterministic_algorithms(flag)
    assert found == [(":4096:8", True)]
    assert (refused.value.key, refused.value.value) == (CUBLAS, ":4096:2:16:8")


def import_again() -> None:
    """Print what importing our modules uses of torch.cuda, and then what a use of it adds."""
    for name, module in [*sys.modules.items()]:
        file = Path(getattr(module, "__file__", None) or "/")
        if ROOT in file.parents and "site-packages" not in file.parts:
            del sys.modules[name]
    used = []
    for name in ("is_available", "device_count", "_lazy_init", "get_device_properties"):
        setattr(torch.cuda, name, lambda *_, name=name: used.append(name))
    importlib.import_module("train")
    print(used)
    torch.cuda.is_available()
    print(used, flush=True)


def test_no_import_uses_cuda(tmp_path):
    """`import train` does not initialize CUDA, which would read the variable too early."""
    log, errors = tmp_path / "log", tmp_path / "errors"
    assert status(forked(log, import_again, errors=errors)) == 0, errors.read_text()
    assert log.read_text().splitlines() == ["[]", "['is_available']"]


# --- open files -----------------------------------------------------------------------------------


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
def test_groups_open_as_many_sockets_as_is_said(ranks):
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
def test_the_limit_of_open_files_is_raised(monkeypatch, soft, hard, raised):
    """To what 1,024 ranks need, or as far as the hard limit permits, which is then a problem for
    the preflight; it is never lowered."""
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert ("needs up to 6,656" in raise_open_files(1024)) == (hard == 4096)
    assert limits == ([(raised, hard)] if raised else [])
