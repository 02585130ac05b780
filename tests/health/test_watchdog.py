"""If a rank hangs, every rank records where it is, and exits."""

import _thread
import ctypes
import itertools
import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch
import torch.distributed as dist

import runtime.watchdog
from proofs.ranks import RankError
from runtime.all_listeners import Watching
from runtime.evaluation.listener import Evaluation
from runtime.log.run_log import RunLog
from runtime.watchdog import Watchdog, innermost_line, recorded_collectives, where_it_waits
from settings.load import load_config
from tests.planted import planted
from tests.runs import events_of, forked, status, train_run, write_config
from training.step import TrainStep


def run_with_a_sleeper(arguments: list[str]) -> str:
    """Train; in the third step, rank 2 sleeps forever."""
    steps = itertools.count(1)

    @planted(TrainStep, "microbatches")
    def sleeping(microbatches: Any, *batch: Any, **options: Any) -> Any:
        if next(steps) == 3 and dist.get_rank() == 2:
            time.sleep(1e6)
        return microbatches(*batch, **options)

    with patch.multiple(runtime.watchdog, LOOK_SECONDS=0.1, GRACE_SECONDS=5.0), sleeping():
        return train_run(arguments)


@pytest.mark.thorough
def test_a_rank_that_sleeps_for_ever(ranks, data, tmp_path):
    guard = {"hang_factor": 1.0, "hang_seconds": 20.0}  # a step may take seconds beside other tests
    config = write_config(tmp_path, data, parallel={"tp": 2, "dp_shard": 2}, guard=guard)
    with pytest.raises(RankError, match="died with exit code 1"):
        ranks.run(run_with_a_sleeper, 4, [config])
    files = {file.name: file.read_text() for file in (tmp_path / "run" / "hang").iterdir()}
    assert sorted(files) == [f"step-00000003-rank-{r:05d}.txt" for r in range(4)]
    for name, text in files.items():
        first, *rest = text.splitlines()
        where = r"at [a-z_/]+\.py:\d+ \w+, waiting in "
        assert re.match(rf"rank \d has not finished step 3 after \d+ s: {where}", first)
        assert "last collectives:" in rest[0]
        assert any("(done)" in line for line in rest), "earlier collectives are listed too"
        assert "MainThread" in text or "most recent call first" in text
        # only the hanging rank is inside this test's code
        assert ("rank-00002" in name) == ("at tests/health/test_watchdog.py" in first)
    others = [text.splitlines()[0] for name, text in files.items() if "rank-00002" not in name]
    assert any(re.search(r"waiting in gloo:\w+ number \d+ of \w+, \[\[", line) for line in others)
    (event,) = events_of(tmp_path / "run", "hang")
    assert event["step"] == 2


def test_the_clock_rests_and_is_patient(data, tmp_path):
    """The watchdog raises no alarm before a step was measured, while it rests, or if steps
    regularly take that long; otherwise it does. The test advances a fake clock."""
    guard = {"hang_factor": 3.0, "hang_seconds": 20.0}
    config = load_config(write_config(tmp_path, data, guard=guard), [])
    watchdog, now, alarms = Watchdog(config, RunLog(config)), [0.0], []
    # it looks once, and is then closed
    closed = {"wait.side_effect": itertools.cycle([False, True]), "is_set.return_value": False}
    watchdog._closed = Mock(**closed)

    def alarms_after(seconds):
        now[0] += seconds
        watchdog._watch()
        return alarms

    with (
        patch.object(Watchdog, "_give_up", lambda self: alarms.append(self._step)),
        patch.object(runtime.watchdog, "time", SimpleNamespace(monotonic=lambda: now[0])),
        patch.object(runtime.watchdog, "faulthandler", Mock()),
    ):
        watchdog.step_done(1, None)
        assert alarms_after(1e6) == [], "no step was measured"
        watchdog.step_done(2, 1.0)
        assert alarms_after(19.0) == []
        with watchdog.resting():
            with watchdog.resting():
                pass
            assert alarms_after(1e6) == []
        assert alarms_after(19.0) == [], "the time counts from the end of the rest"
        for step in range(3, 6):
            watchdog.step_done(step, 100.0)
        assert alarms_after(290.0) == [], "steps take a hundred seconds"
        assert alarms_after(20.0) == [5]
        for step in range(6, 16):
            watchdog.step_done(step, 1.0)
        assert alarms_after(21.0) == [5, 15]
        run: Any = SimpleNamespace(watchdog=watchdog, step=4)
        Watching().went_back(run, run)  # a rollback: step 5 comes again
        assert alarms_after(21.0) == [5, 15, 4]


def test_each_batch_of_an_evaluation_has_its_time():
    run, of_one = MagicMock(), lambda train, heldout, goes_on: goes_on() or None
    with patch("runtime.evaluation.listener.heldout_loss", of_one):
        Evaluation(Mock(), None, []).after_step(run)
    run.watchdog.beat.assert_called_once()


def sleep_in_c(config: str) -> None:
    """Hold Python's global lock, which stops all Python threads."""
    runtime.watchdog.GRACE_SECONDS = 0.1
    resolved = load_config(config, [])
    with closing(Watchdog(resolved, RunLog(resolved)).start()) as watchdog:
        watchdog.step_done(1, 0.01)
        ctypes.PyDLL(None).sleep(1000)


def test_native_code_that_never_returns(data, tmp_path):
    config = write_config(tmp_path, data, guard={"hang_factor": 1.0, "hang_seconds": 0.1})
    assert status(forked(tmp_path / "log", sleep_in_c, config)) == 1
    said = (tmp_path / "log").read_text()
    assert "Timeout" in said
    assert "Current thread" in said or "most recent call first" in said


def test_every_thread_is_named():
    """A backward that hangs in another thread than the main one, as on a GPU in autograd's: its
    line is written too, after the main thread's. Control: the main thread's does not show it."""
    started, go_on = threading.Event(), threading.Event()

    def wait_here(_: torch.Tensor) -> None:
        started.set()
        go_on.wait()

    y = torch.ones(1, requires_grad=True).clone()
    y.register_hook(wait_here)
    # not in threading's list, as a thread that C++ has started
    _thread.start_new_thread(y.backward, ())
    assert started.wait(60)
    try:
        with ThreadPoolExecutor(1) as watchdog:
            main, *others = watchdog.submit(where_it_waits).result().split("; ")
        assert re.match(r"at \S+/test_watchdog\.py:\d+ test_every_thread_is_named, waiting", main)
        (line,) = (each for each in others if "wait_here" in each)
        thread = r"a C\+\+ thread \(autograd\)"
        assert re.fullmatch(rf"{thread} at \S+/test_watchdog\.py:\d+ wait_here", line)
        alone = innermost_line(sys._current_frames()[threading.main_thread().ident or 0])
        assert "wait_here" not in alone
    finally:
        go_on.set()


def test_only_what_hangs_is_waited_for(monkeypatch):
    """On GPUs: a pipeline's messages of earlier steps are done, although NCCL says it only of their
    batch; and gloo's collectives, one per step, do not displace NCCL's."""
    times = itertools.count()

    def entry(name: str, number: int, retired: bool) -> dict[str, Any]:
        return {
            "profiling_name": name, "collective_seq_id": number, "retired": retired,
            "is_p2p": "<-" in name, "time_created_ns": next(times), "pg_id": int("all" in name),
            "process_group": ["1", "a_mesh"], "input_sizes": [[2]], "input_dtypes": ["Float"],
        }  # fmt: skip

    def batch(number: int, retired: bool) -> list[dict[str, Any]]:
        messages = [entry(f"nccl:recv {other}<-0", number, False) for other in (1, 2)]
        return [*messages, entry("nccl:coalesced", number, retired)]

    nccl, gloo = [], []
    for step in range(20):
        nccl += [*batch(step, True), entry("nccl:all_reduce", step, True)]
        gloo.append(entry("gloo:all_reduce", step, True))
    nccl += [*batch(20, False), entry("nccl:all_reduce", 20, False)]
    for recorder, entries in (("nccl", nccl), ("fr", gloo)):
        text = json.dumps({"entries": entries})
        name = f"_dump_{recorder}_trace_json"
        monkeypatch.setattr(torch._C._distributed_c10d, name, lambda text=text: text, raising=False)
    names = ["recv 1<-0", "recv 2<-0", "coalesced", "all_reduce"]
    hangs = "; ".join(f"nccl:{name} number 20 of a_mesh, [[2]] Float" for name in names)
    assert f", waiting in {hangs}" in where_it_waits()
    before = [said.split(" number")[0] for said, _ in recorded_collectives()[-9:-4]]
    assert before == [*(f"nccl:{name}" for name in names), "gloo:all_reduce"]
