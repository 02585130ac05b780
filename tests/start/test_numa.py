"""A rank runs on the CPUs next to its GPU, as far as it may."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from runtime.start import host, init

GPUS = [f"0000:{bus:02x}:00.0" for bus in (0x1B, 0x3C, 0x9A, 0xBB)]
NODES = {"0": "0-15,32-47\n", "1": "16-31,48-63\n", "-": "0-63\n", "x": "x", "n": "\n"}
FIRST, SECOND = {*range(16), *range(32, 48)}, {*range(16, 32), *range(48, 64)}
ALL = FIRST | SECOND


def properties(gpu: int) -> SimpleNamespace:
    """What torch says of a GPU."""
    domain, bus, device = (int(part, 16) for part in GPUS[gpu].removesuffix(".0").split(":"))
    return SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_gpus: str, ranks: int, gpu: int,
    allowed: set[int], cpus: set[int], threads: int, why_not: str,
) -> None:  # fmt: skip
    """In a pretended sysfs with the CPUs next to each GPU, those of its node (" ": no file)."""
    for address, node in zip(GPUS, of_gpus, strict=True):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        if node in NODES:
            (device / "local_cpulist").write_text(NODES[node])
    bound: list[set[int]] = []
    monkeypatch.setattr(host, "SYSTEM", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    found, said = host.bind_to_gpu(gpu, ranks)
    assert (bound, found) == ([cpus], threads)
    assert said.startswith(why_not)
    assert bool(said) == bool(why_not)


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

    def bind(gpu: int, ranks: int) -> tuple[int, str]:
        calls.append(f"bind {gpu} of {ranks}")
        return 3, "a reason"

    monkeypatch.setattr(host, "bind_to_gpu", bind)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: calls.append(f"device {gpu}"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: calls.append(f"{count} threads"))
    torch.set_float32_matmul_precision("high")  # as with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 10)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **given: None)
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
    assert calls == ["bind 3 of 10", *threads, "device 3"]
    assert "rank 0 is not bound to the CPUs next to its GPU: a reason" in capsys.readouterr().err
