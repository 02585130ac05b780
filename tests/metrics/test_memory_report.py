"""Memory reports: written when memory runs out and on request; the plan agrees."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch

import train
from parallel.pipeline.runner import PipelineRunner
from runtime import stop
from runtime.metrics.memory_report import MemoryReports
from settings.load import load_config
from tests.planted import planted
from tests.runs import said_by, status_of, train_run, write_config
from tools.plan import memory as planner
from tools.plan.layout import Layout


def run_out_of_memory(arguments: list[str], actions: int) -> bool:
    """Train with memory that runs out after `actions` actions of the second step. Returns whether
    the run ended with an out-of-memory error."""
    before = iter(range(8 + actions - 1))  # a step has 4 forwards and 4 backwards

    @planted(PipelineRunner, "_give")
    def give_until_it_is_full(give: Any, *given: Any) -> None:
        if next(before, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        give(*given)

    with give_until_it_is_full():
        return "OutOfMemoryError" in said_by(train_run, arguments)


def cells(report: str) -> dict[str, str]:
    """Category → the size in its row of a report."""
    rows = (line.rsplit("  ", 1) for line in report.splitlines() if line.endswith("MB"))
    return {name.strip(): size.strip() for name, size in rows}


def test_out_of_memory(ranks, data, tmp_path):
    """With bfloat16 and ZeRO-1, out of memory after two micro-batches, the report counts gathered
    weights and also whole gradients in float32, which only FSDP holds; the plan agrees."""
    steps, layout = {"dtype": "bfloat16", "micro_batch_size": 1}, {"dp_shard": 2}
    file = write_config(tmp_path, data, train=steps, parallel=layout, model={"num_layers": 2})
    assert ranks.run(run_out_of_memory, 2, [file], 4) == [True, True]
    for rank in range(2):
        written = tmp_path / "run" / "memory" / f"step-00000002-rank-{rank:05d}.txt"
        report = written.read_text()
        assert report.startswith("why: out of memory in step 2: ")
        assert f"rank: {rank}\nworld: 2\n" in report
        assert f"'dp_shard': {rank}" in report
        assert "Tried to allocate 2.00 GiB." in report
        found = cells(report)
        plan = planner.Memory(Layout.of_rank(load_config(file, []), 2, rank))
        for category in ("sharded weights", "optimizer state", "gathered weights"):
            assert found[category] == f"{plan.at_peak[category] / 1e6:,.3f} MB", category
        whole = sum(unit.numel for unit in plan.units[0]) * 4
        assert found["whole gradients"] == f"{whole / 1e6:,.3f} MB"
        resident = float(found["together"].removesuffix(" MB").replace(",", ""))
        assert resident > 50, "a process with torch in it"
    assert status_of(tmp_path)["state"] == "failed"


def train_with_requests(arguments: list[str]) -> str:
    """Train with a file SNAPSHOT that appears in the third step."""
    request = Path(load_config(arguments[0], []).run.dir) / "SNAPSHOT"

    @planted(train.TrainStep, "__call__")
    def asking(call: Any, self: train.TrainStep, step: int, *batch: torch.Tensor) -> Any:
        if step == 2:
            request.touch()
        return call(self, step, *batch)

    with asking(), patch.object(stop, "LOOK_SECONDS", 0.0):
        return train_run(arguments)


def test_on_request(ranks, data, tmp_path):
    """The ranks of run.profile_ranks answer, once; the file is removed."""
    sections = {"model": {"num_layers": 2}, "train": {"micro_batch_size": 4}}
    config = write_config(tmp_path, data, parallel={"dp_shard": 2}, **sections)
    assert ranks.run(train_with_requests, 2, [config]) == ["", ""]
    assert not (tmp_path / "run" / "SNAPSHOT").exists()
    assert not (tmp_path / "run" / "profile").exists()
    numbers, report = sorted((tmp_path / "run" / "memory").iterdir())
    step = 4 if "00000004" in report.name else 5  # it is asked for in step 3
    assert (numbers.stem, report.name) == (report.stem, f"step-{step:08d}-rank-00000.txt")
    assert f"requested after step {step}" in report.read_text()
    assert status_of(tmp_path)["state"] == "finished"


def report_of_a_gpu(folder: str) -> None:
    """Write the report of a GPU that runs out of memory in step 8, with made-up answers from
    torch.cuda."""
    optimizer = SimpleNamespace(states=[{"exp_avg": torch.ones(1_000_000)}])
    pretended = Mock(stages={}, weights=[], optimizer=optimizer)
    pretended.mesh = Mock(device="cuda")
    pretended.mesh.root.size.return_value, pretended.mesh.coordinates.return_value = 1, {"pp": 0}
    pretended.config.parallel = SimpleNamespace(offload="none")
    pretended.config.run = SimpleNamespace(dir=folder, memory_history=True, profile_ranks=[0])
    answers = {"memory_allocated": 8_000_000, "mem_get_info": (1_000_000, 80_000_000),
               "memory_summary": "torch's own table"}  # fmt: skip
    history = Mock()
    memory = {
        "_record_memory_history": history,
        "_dump_snapshot": lambda path: Path(path).write_bytes(b"snapshot"),
    }
    with (
        patch.multiple(torch.cuda, **{n: lambda a=a: a for n, a in answers.items()}),
        patch.multiple(torch.cuda.memory, **memory),
    ):
        reports, at = MemoryReports(pretended), Mock(step=7)
        reports.begins(at)
        assert history.call_args.kwargs == {"max_entries": 100_000, "stacks": "python"}
        reports.closes(at, torch.OutOfMemoryError("CUDA out of memory."))


def test_a_gpus_report(ranks, tmp_path):
    ranks.run(report_of_a_gpu, 1, str(tmp_path))
    written = tmp_path / "memory" / "step-00000008-rank-00000.txt"
    report = written.read_text()
    assert "The device has 80 MB, of which 1 MB are free." in report
    assert "torch's own table" in report
    assert cells(report)["everything else"] == cells(report)["together"] == "8.000 MB"
    assert cells(report)["optimizer state"] == "0.000 MB", "host memory does not count"
    assert written.with_suffix(".pickle").read_bytes() == b"snapshot"
