"""A rank runs on the CPUs next to its GPU, as far as it may."""

import os
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from runtime.start import host, init
from runtime.start.host import Share, bind_to_gpu, cpus_near

GPUS = [f"0000:{bus:02x}:00.0" for bus in (0x1B, 0x3C, 0x9A, 0xBB)]
NODES = {"0": "0-15,32-47\n", "1": "16-31,48-63\n", "-1": "0-63\n", "x": "x", "none": "\n"}
FIRST, SECOND = {*range(16), *range(32, 48)}, {*range(16, 32), *range(48, 64)}
ALL = FIRST | SECOND


def pretend(folder: Path, of_gpus: str | list[str] = "0011", nodes: dict[str, str] = NODES) -> Path:
    """A pretended sysfs: the CPUs next to each GPU, those of its node ("": the file is missing)."""
    for address, node in zip(GPUS, of_gpus, strict=True):
        device = folder / "bus/pci/devices" / address
        device.mkdir(parents=True)
        if node:
            (device / "local_cpulist").write_text(nodes[node])
    return folder


def test_each_gpu_has_the_cpus_of_its_node(tmp_path: Path) -> None:
    system = pretend(tmp_path)
    chosen = [cpus_near(gpu, GPUS, ALL, system) for gpu in GPUS]
    assert chosen == [Share(FIRST, 2), Share(FIRST, 2), Share(SECOND, 2), Share(SECOND, 2)]


def test_only_cpus_that_are_allowed(tmp_path: Path) -> None:
    """Slurm's --cpu-bind, a container or taskset has chosen some; no others are added."""
    system = pretend(tmp_path)
    assert cpus_near(GPUS[0], GPUS, set(range(8, 24)), system) == Share(set(range(8, 16)), 2)
    assert cpus_near(GPUS[0], GPUS, set(range(8)), system) == Share(set(range(8)), 2)


@pytest.mark.parametrize(
    ("allowed", "why_not"),
    [
        (SECOND, "it may use 0 of these CPUs"),
        # two ranks would share these
        (SECOND | set(range(7)), "it may use 7 of these CPUs, too few for the 2 ranks there"),
    ],
)
def test_too_few_cpus_leave_it_as_it_is(tmp_path: Path, allowed: set[int], why_not: str) -> None:
    share = cpus_near(GPUS[0], GPUS, allowed, pretend(tmp_path))
    assert (share.cpus, share.ranks) == (allowed, len(GPUS))
    assert share.why_not.startswith(why_not)


@pytest.mark.parametrize("node", ["-1", "", "x", "none"])
def test_an_unknown_node_leaves_it_as_it_is(tmp_path: Path, node: str) -> None:
    """Linux says that all CPUs are near, or nothing. It is not taken to be on node 0."""
    system = pretend(tmp_path, [node, "0", "1", "1"])
    assert cpus_near(GPUS[0], GPUS, ALL, system) == Share(ALL, len(GPUS))
    assert cpus_near(GPUS[1], GPUS, ALL, system) == Share(FIRST, 2), "the others are bound"


class Properties:
    """What torch says of a GPU."""

    def __init__(self, gpu: int) -> None:
        domain, bus, device = GPUS[gpu].removesuffix(".0").split(":")
        self.pci_domain_id, self.pci_bus_id = int(domain, 16), int(bus, 16)
        self.pci_device_id = int(device, 16)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one CPU"
)
def test_threads_that_start_later_are_bound_too(tmp_path: Path) -> None:
    """As the thread that reads data and the one that saves. (In a thread of its own, because a
    binding belongs to a thread.)"""
    first, *others = sorted(os.sched_getaffinity(0))
    nodes = {"0": ",".join(map(str, others)), "1": str(first)}
    system, found = pretend(tmp_path, nodes=nodes), []

    def rank() -> None:
        assert bind_to_gpu(2, len(GPUS), system) == Share({first}, 2)
        found.append(os.sched_getaffinity(0))
        later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        later.start()
        later.join()

    with (
        patch.object(torch.cuda, "device_count", lambda: len(GPUS)),
        patch.object(torch.cuda, "get_device_properties", Properties),
        patch.object(host, "CPUS_PER_RANK", 0),
    ):
        thread = threading.Thread(target=rank)
        thread.start()
        thread.join()
    assert found == [{first}, {first}]
    assert os.sched_getaffinity(0) == {first, *others}


@pytest.mark.parametrize(
    ("of_gpus", "ranks", "threads"),
    [
        ("0011", 4, [16, 16, 16, 16]),  # 32 CPUs of a node for two ranks
        ("0001", 4, [10, 10, 10, 32]),
        ("0011", 3, [16, 16, 32]),  # the last GPU has no rank
        ("0011", 2, [16, 16]),  # nobody uses the other node's CPUs
        ("0101", 1, [32]),
        ("0000", 4, [8, 8, 8, 8]),
        (["-1", "0", "1", "1"], 4, [16, 16, 10, 10]),  # the first may run on all CPUs
        ("0011", 8, [4, 4, 4, 4]),  # each of 8 ranks sees 4 GPUs: which it shares is not known
    ],
)
def test_the_ranks_of_a_node_divide_its_cpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_gpus: str | list[str],
    ranks: int,
    threads: list[int],
) -> None:
    system, found = pretend(tmp_path, of_gpus=of_gpus), []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    bound = [ALL]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: bound[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    monkeypatch.setattr(host, "bind_to_gpu", lambda gpu, ranks: bind_to_gpu(gpu, ranks, system))
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for gpu in range(min(ranks, len(GPUS))):
        bound[:] = [ALL]  # each rank is a process of its own
        host.use_gpu(gpu, gpu, ranks)
    assert found == threads


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.mark.parametrize("allocator", [None, *ALLOCATOR])
@pytest.mark.parametrize(("given", "threads"), [(None, ["3 threads"]), ("5", [])])
def test_a_rank_is_bound_before_its_device_is_set(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    threads: list[str],
    allocator: str | None,
) -> None:
    """The device's context has threads and memory of its own. The ranks share the CPUs, unless the
    user has said how. If nothing was bound, the rank says why.

    Before the device is set, its allocator has its setting, unless the user has set one by either
    name; and whatever the environment says, products of float32 are not TF32."""
    calls: list[str] = []

    def bind(gpu: int, ranks: int) -> Share:
        calls.append(f"bind {gpu}")
        return Share(FIRST, ranks, "a reason")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 10)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: calls.append(f"device {gpu}"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: calls.append(f"{count} threads"))
    monkeypatch.setattr(host, "bind_to_gpu", bind)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **given: None)
    for name in ("OMP_NUM_THREADS", "TORCH_NCCL_HIGH_PRIORITY", *ALLOCATOR):
        monkeypatch.setenv(name, "")  # so that it is restored
        del os.environ[name]
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    for name, value in {"RANK": "0", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "10"}.items():
        monkeypatch.setenv(name, value)
    if allocator:
        monkeypatch.setenv(allocator, "max_split_size_mb:64")
    torch.set_float32_matmul_precision("high")  # as with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
    assert init.init_distributed(store=dist.HashStore()) == "cuda"
    assert torch.get_float32_matmul_precision() == "highest"
    assert calls == ["bind 3", *threads, "device 3"]
    expected = {allocator or ALLOCATOR[0]: "max_split_size_mb:64"}
    if not allocator:
        expected = {ALLOCATOR[0]: "expandable_segments:True"}
    assert {name: os.environ[name] for name in ALLOCATOR if name in os.environ} == expected
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert "rank 0 is not bound to the CPUs next to its GPU: a reason" in capsys.readouterr().err
