"""User errors give one message that names key, value and remedy, the same on every rank, and
nothing is written."""

import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from errors import RunFailed
from parallel.pipeline.actions import BACKWARD, FORWARD, Action
from parallel.pipeline.schedules import SCHEDULES
from proofs.ranks import Ranks
from runtime import exit as rank_exit
from runtime.health.examine import FaultyMachine
from runtime.signals import Signals
from tests.data_samples import SOURCE, prepared
from tests.runs import forked, messages, status, write_config
from train import main

# (override, what is said of its key); types and bounds: test_config.py
WRONG = [
    ("train.stepz=3", "did you mean train.steps?"),
    ("parallel.tp=4", "does not make the world of 2"),
    ("parallel.dp_shard=4", "start exactly 4 processes"),
    ("model.num_kv_heads=3", "choose one of [1, 2, 4]"),
    ("model.attention_dim=30", "for example 512, or null for model.dim"),
    ("model.rope_low_freq_factor=4", "below model.rope_high_freq_factor=4.0"),
    ("train.global_batch_size=7", "multiple"),
    ("parallel.schedule=2f2b", "1f1b"),
    ("parallel.stages_per_rank=2", "one stage per rank"),
    ("parallel.layers_per_stage=[4, 4]", "pp · stages_per_rank = 1"),
    ("parallel.zero_stage=0", "dp_replicate=2"),
    ("run.dir=/etc/hosts/run", "not a writable folder"),
    ("optimizer.pure_bfloat16=true", "train.dtype=float32"),
    ("model.vocab_size=700", "set model.vocab_size=800"),
    ("train.seq_len=1000000", "tokens"),
    ("data.path=/nowhere", "prepare"),
    ("checkpoint.resume=/nowhere", "a run folder or a folder step-…"),
    ("run.on_event=no-such-program", "not an executable"),
    ("train.tasks=[python]", "train.eval_interval is 0"),
    ("guard.inject_fault={rank: 1, step: 2}", "there is no such key"),
]
TOGETHER = [  # (overrides, beginning of the message, what else it says)
    (["trian.steps=3"], "trian = ", "did you mean train?"),
    (["steps=3"], "command line = ", "section.key=value"),
    (["optimizer.schedule=wsd"], "optimizer.decay_steps = ", "between 1 and"),
    (["model.dim=1048576"], "model = ", "use more processes"),
    (["train.compile=true", "parallel.schedule=zb_h1"],
     "train.compile = True: a compiled block forms its weight gradients in backward", "zb_h1"),
    (["train.compile=true", "parallel.tp=2"],
     "train.compile = True: the compiler runs the collectives",
     "set train.compile=false, or parallel.tp=1"),
    (["train.compile=true", "train.dtype=bfloat16", "train.micro_batch_size=4",
      "parallel.fsdp_unit=stage"],
     "train.compile = True: compiled blocks leave", "parallel.fsdp_unit=block"),
    (["train.compile=true", "train.dtype=bfloat16", "train.micro_batch_size=8", "parallel.pp=2",
      "parallel.fsdp_unit=stage", "parallel.offload=host"],
     "train.compile = True: compiled blocks leave", "parallel.fsdp_unit=block"),
    *((["parallel.reduce_dtype=bfloat16", *others],
       "parallel.reduce_dtype = 'bfloat16': gradients of micro-batches would be summed in bfloat16",
       "parallel.zero_stage=2")
      for others in (["train.dtype=bfloat16"], ["train.compile=true"],
                     ["parallel.dp_replicate=2", "parallel.zero_stage=2"],
                     ["parallel.offload=host", "parallel.zero_stage=2"],
                     ["train.dtype=bfloat16", "optimizer.pure_bfloat16=true",
                      "parallel.zero_stage=2"])),
    (["optimizer.name=muon", "optimizer.muon.qk_clip_interval=10"],
     "optimizer.muon.qk_clip_interval = 10: nothing is measured", "leave it out"),
    (["parallel.tp=2", "model.num_heads=3", "model.num_kv_heads=3", "model.attention_dim=30"],
     "parallel.tp = 2: does not divide model.num_heads=3", "[1, 3]"),
    # every second micro-batch would wait for its own gradient
    (["parallel.schedule=backward_first", "parallel.pp=2"],
     "parallel.schedule = 'backward_first': ranks cannot continue: rank 0 at B0.0", "remedy"),
]  # fmt: skip
REFUSED = [*(([name], f"{name.partition('=')[0]} = ", said) for name, said in WRONG), *TOGETHER]


def backward_first(p: int, v: int, m: int) -> list[list[Action]]:
    """A schedule that would wait forever."""
    return [[Action(k, r, i) for k in (BACKWARD, FORWARD) for i in range(m)] for r in range(p)]


def judge(cases: dict[str, list[str]], config: str, data: dict[str, list[Path]]) -> dict[str, str]:
    """What this rank is told of each case, and where each rank has data of its own."""
    mine = {case: [config, f"data.path={of[dist.get_rank()]}"] for case, of in data.items()}
    with patch.dict(SCHEDULES, backward_first=backward_first):
        return messages(cases | mine)


@pytest.fixture(scope="module")
def judged(ranks: Ranks, data: Path, tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    """A folder in which each refused run would have written a folder of its number, and what each
    rank was told."""
    folder = tmp_path_factory.mktemp("refused")
    config = write_config(folder, data)
    cases = {
        str(number): [config, f"run.dir={folder / str(number)}", *overrides]
        for number, (overrides, _, _) in enumerate(REFUSED)
    }
    others = {"unseen": Path("/not/on/this/node"), "other": prepared(folder / "other", SOURCE)}
    of_ranks = {case: [data, rank_1] for case, rank_1 in others.items()}
    return folder, ranks.run(judge, 2, cases, config, of_ranks)


def told(judged: tuple[Path, list[dict[str, str]]], case: str) -> str:
    """The one message, which every rank knows."""
    (message,) = {of_rank[case] for of_rank in judged[1]}
    return message


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: " ".join(REFUSED[n][0]))
def test_wrong_value(judged: tuple[Path, list[dict[str, str]]], number: int) -> None:
    _, begins, remedy = REFUSED[number]
    message = told(judged, str(number))
    assert message.startswith(begins)
    assert remedy in message
    assert not (judged[0] / str(number)).exists(), "nothing is written"


def test_an_error_of_one_rank_is_everyones(judged: tuple[Path, list[dict[str, str]]]) -> None:
    """If one node does not see the data, or has other data, all ranks fail with its message, and
    none waits forever."""
    assert told(judged, "unseen").startswith("data.path = '/not/on/this/node': ")
    assert "are not rank 0's" in told(judged, "other")


def train_alone(arguments: list[str]) -> None:
    main(arguments, Signals(speaks=True).listen())


def test_exit_status_and_one_message(data: Path, tmp_path: Path) -> None:
    """Without a traceback. (Under torchrun, whose agent ends too: start/test_spares.py; that it
    restarts a rank that was killed: drills/test_kill_drill.py.)"""
    train = [write_config(tmp_path, data), "model.num_heads=5"]
    assert status(forked(tmp_path / "log", train_alone, train)) == 2
    alone = (tmp_path / "log").read_text()
    assert alone.count("model.num_heads = 5") == 1
    assert "Traceback" not in alone
    assert not (tmp_path / "run").exists()


def test_only_torchrun_is_stopped() -> None:
    for command, is_torchrun in {
        "/usr/bin/python3.11 /opt/venv/bin/torchrun --nnodes 2 train.py": True,
        "python -m torch.distributed.run train.py": True,
        "python -W ignore -X faulthandler -m torch.distributed.run train.py": True,
        "/venv/bin/python -u -m tools.torchrun train.py": True,
        "python train.py CONFIG torchrun": False,
        "python -m tools.launch -m torch.distributed.run": False,
        "srun torchrun train.py": False,
        "": False,
    }.items():
        assert rank_exit.runs_torchrun(command.split(" ")) is is_torchrun, command
    first = patch.object(rank_exit.os, "getppid", return_value=1)  # of a container
    with first, patch.object(rank_exit, "runs_torchrun", return_value=True):
        assert rank_exit.find_agent() == 1


def test_a_faulty_node_is_not_restarted_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job then begins anew, without it; with `parallel.layouts` the ranks themselves leave it
    out. After any other failure torchrun restarts the ranks where they are."""
    stops: list[str] = []
    monkeypatch.setattr(rank_exit.os, "_exit", lambda _: None)
    monkeypatch.setattr(rank_exit.dist, "barrier", lambda: None)
    monkeypatch.setattr(rank_exit, "stop_agent", stops.append)
    for error in (RunFailed("spikes"), FaultyMachine("wrong", True), FaultyMachine("wrong", False)):
        assert not stops
        rank_exit.fail(error, Mock(heard=[]))
    assert stops == ["ended"]  # not "refused", after which a job is not requeued


@pytest.mark.parametrize(("restarts", "stopped"), [(0, True), (3, False)])
def test_one_rank_of_a_node_stops_torchrun(tmp_path, monkeypatch, restarts, stopped) -> None:
    """If torchrun has a restart left; after the last one it ends by itself. The job script finds
    the mark either way."""
    attempt = tmp_path / f"attempt_{restarts}"
    (attempt / "1").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(attempt / "1" / "error.json"))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        for expected in (stopped, False):
            with subprocess.Popen(["sleep", "60"]) as agent:
                with patch.object(rank_exit, "find_agent", lambda pid=agent.pid: pid):
                    rank_exit.stop_agent()
                agent.kill()  # does nothing after SIGTERM
                assert (agent.wait() == -signal.SIGTERM) is expected
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert (attempt / "refused").exists()
