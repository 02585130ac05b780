"""Memory reports: written when memory runs out and on request; the plan agrees."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from parallel.pipeline.runner import PipelineRunner
from runtime import stop
from runtime.metrics.memory_report import MemoryReports
from settings.load import load_config
from tests.planted import planted
from tests.runs import names, said_by, status_of, train_run, write_config
from tools.plan import memory as planner
from tools.plan.layout import Layout

ACTIONS = 8  # of a step: 4 forwards and 4 backwards


def run_out_of_memory(arguments: list[str], actions: int) -> bool:
    """Train with a file SNAPSHOT that appears in the third step, and memory that runs out after
    `actions` actions of the sixth. Returns whether the run ended with an out-of-memory error."""
    request, begun = Path(load_config(arguments[0], []).run.dir) / "SNAPSHOT", count(1)

    @planted(PipelineRunner, "_give")
    def give_until_it_is_full(give: Any, *given: Any) -> None:
        number = next(begun)
        if number == 2 * ACTIONS + 1:
            request.touch()
        if number == 5 * ACTIONS + actions:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        give(*given)

    with give_until_it_is_full(), patch.object(stop, "LOOK_SECONDS", 0.0):
        return "OutOfMemoryError" in said_by(train_run, arguments)


def cells(report: str) -> dict[str, str]:
    """Category → the size in its row of a report."""
    rows = (line.rsplit("  ", 1) for line in report.splitlines() if line.endswith("MB"))
    return {name.strip(): size.strip() for name, size in rows}


@pytest.fixture(scope="module")
def reported(ranks, data, tmp_path_factory):
    """A run on two ranks, with bfloat16 and ZeRO-1, that is asked for a report and is out of memory
    after two micro-batches of step 6."""
    folder = tmp_path_factory.mktemp("memory")
    steps, layout = {"dtype": "bfloat16", "micro_batch_size": 1}, {"dp_shard": 2}
    file = write_config(folder, data, train=steps, parallel=layout, model={"num_layers": 2})
    assert ranks.run(run_out_of_memory, 2, [file], 4) == [True, True]
    assert status_of(folder)["state"] == "failed"
    return folder


def test_out_of_memory(reported):
    """The report counts gathered weights and also whole gradients in float32, which only FSDP
    holds; the plan agrees."""
    file = str(reported / "config.yaml")
    for rank in range(2):
        written = reported / "run" / "memory" / f"step-00000006-rank-{rank:05d}.txt"
        report = written.read_text()
        assert report.startswith("why: out of memory in step 6: ")
        assert f"rank: {rank}\nworld: 2\n" in report
        assert f"'dp_shard': {rank}" in report
        assert "Tried to allocate 2.00 GiB." in report
        found = cells(report)
        plan = planner.Memory(Layout.of_rank(load_config(file, []), 2, rank))
        numel = sum(unit.numel for unit in plan.units[0])
        planned = {"gathered weights": numel * 2, "whole gradients": numel * 4}
        planned |= {each: plan.at_peak[each] for each in ("sharded weights", "optimizer state")}
        for category, size in planned.items():
            assert found[category] == f"{size / 1e6:,.3f} MB", category
        resident = float(found["together"].removesuffix(" MB").replace(",", ""))
        assert resident > 50, "a process with torch in it"


def test_on_request(reported):
    """The ranks of run.profile_ranks answer, once; the file is removed."""
    assert not (reported / "run" / "SNAPSHOT").exists()
    assert not (reported / "run" / "profile").exists()
    numbers, report, *_ = sorted((reported / "run" / "memory").iterdir())
    step = 4 if "00000004" in report.name else 5  # it is asked for in step 3
    assert (numbers.stem, report.name) == (report.stem, f"step-{step:08d}-rank-00000.txt")
    assert f"requested after step {step}" in report.read_text()
    assert len(names(reported / "run" / "memory")) == 6


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
