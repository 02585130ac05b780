"""A rank runs on the CPUs next to its GPU, as far as it may."""

import os
from pathlib import Path
from types import SimpleNamespace
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


def pretend(folder: Path, of_gpus: str | list[str]) -> Path:
    """A pretended sysfs: the CPUs next to each GPU, those of its node ("": the file is missing)."""
    for address, node in zip(GPUS, of_gpus, strict=True):
        device = folder / "bus/pci/devices" / address
        device.mkdir(parents=True)
        if node:
            (device / "local_cpulist").write_text(NODES[node])
    return folder


@pytest.mark.parametrize(
    ("gpu", "of_first", "allowed", "expected"),
    [
        (0, "0", ALL, Share(FIRST, 2)),
        (3, "0", ALL, Share(SECOND, 2)),
        # Slurm's --cpu-bind, a container or taskset has chosen some; no others are added
        (0, "0", {*range(8, 24)}, Share({*range(8, 16)}, 2)),
        # too few are left
        (0, "0", SECOND, Share(SECOND, 4, "it may use 0 of these CPUs, too few")),
        (0, "0", SECOND | {*range(7)},
         Share(SECOND | {*range(7)}, 4, "it may use 7 of these CPUs, too few for the 2 ranks")),
        # Linux says that all CPUs are near, or nothing: it is not taken to be on node 0
        *((0, node, ALL, Share(ALL, 4)) for node in ("-1", "", "x", "none")),
    ],
)  # fmt: skip
def test_the_cpus_of_a_gpu(
    tmp_path: Path, gpu: int, of_first: str, allowed: set[int], expected: Share
) -> None:
    share = cpus_near(GPUS[gpu], GPUS, allowed, pretend(tmp_path, [of_first, "0", "1", "1"]))
    assert share[:2] == expected[:2]
    assert share.why_not.startswith(expected.why_not)
    assert bool(share.why_not) == bool(expected.why_not)


def properties(gpu: int) -> SimpleNamespace:
    """What torch says of a GPU."""
    domain, bus, device = (int(part, 16) for part in GPUS[gpu].removesuffix(".0").split(":"))
    return SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device)


@pytest.mark.parametrize(
    ("of_gpus", "ranks", "threads"),
    [
        ("0001", 4, [10, 10, 10, 32]),
        ("0011", 3, [16, 16, 32]),  # the last GPU has no rank
        (["-1", "0", "1", "1"], 4, [16, 16, 10, 10]),  # the first may run on all CPUs
        ("0011", 8, [4, 4, 4, 4]),  # each of 8 ranks sees 4 GPUs: which it shares is not known
    ],
)
def test_the_ranks_of_a_node_divide_its_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    of_gpus: str | list[str], ranks: int, threads: list[int],
) -> None:  # fmt: skip
    system, found, bound = pretend(tmp_path, of_gpus), [], [ALL]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: bound[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    monkeypatch.setattr(host, "bind_to_gpu", lambda gpu, ranks: bind_to_gpu(gpu, ranks, system))
    with patch.dict(os.environ):
        os.environ.pop("OMP_NUM_THREADS", None)
        for gpu in range(min(ranks, len(GPUS))):
            bound[:] = [ALL]  # each rank is a process of its own
            host.use_gpu(gpu, gpu, ranks)
            assert bound[-1] == {"0": FIRST, "1": SECOND, "-": ALL}[of_gpus[gpu][0]]
    assert found == threads


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.mark.parametrize(
    "given",
    [{}, {ALLOCATOR[0]: "max_split_size_mb:64"},
     {ALLOCATOR[1]: "max_split_size_mb:64", "OMP_NUM_THREADS": "5"}],
)  # fmt: skip
def test_a_rank_is_bound_before_its_device_is_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
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
    torch.set_float32_matmul_precision("high")  # as with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
    with patch.dict(os.environ, {"RANK": "0", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "10"}):
        for name in ("OMP_NUM_THREADS", "TORCH_NCCL_HIGH_PRIORITY", *ALLOCATOR):
            os.environ.pop(name, None)
        os.environ |= given
        assert init.init_distributed(store=dist.HashStore()) == "cuda"
        found = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
        assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    own = {name: value for name, value in given.items() if name in ALLOCATOR}
    assert found == (own or {ALLOCATOR[0]: "expandable_segments:True"})
    assert torch.get_float32_matmul_precision() == "highest"
    threads = [] if "OMP_NUM_THREADS" in given else ["3 threads"]
    assert calls == ["bind 3", *threads, "device 3"]
    assert "rank 0 is not bound to the CPUs next to its GPU: a reason" in capsys.readouterr().err
