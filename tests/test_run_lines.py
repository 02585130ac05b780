"""The lines that a run prints at its start and end, word for word."""

import io
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from errors import UserError
from runtime.evaluation import compare_to_unigram
from runtime.messages import log
from runtime.start.topology import describe_stages
from training.load_config import load_config

LAPTOP = "2 stages of 2 blocks each: the slowest rank computes 24% more than the mean"


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("laptop", "", LAPTOP),
        (
            "llama3_8b",
            "parallel.pp=4 parallel.layers_per_stage=auto",
            "4 stages of 8, 8, 9, 7 blocks: the slowest rank computes 7% more than the mean "
            "(even split: 15%)",
        ),
        (
            "llama3_70b",
            "parallel.tp=8 parallel.pp=4 parallel.schedule=1f1b parallel.stages_per_rank=1 "
            "parallel.layers_per_stage=[20,20,21,19]",
            "4 stages of 20, 20, 21, 19 blocks: the slowest rank computes 4% more than the mean "
            "(even split: 3%)",
        ),
    ],
)
def test_stages(name: str, overrides: str, said: str) -> None:
    assert describe_stages(load_config(f"configs/{name}.yaml", overrides.split())) == said


def test_the_readme_shows_the_same_line() -> None:
    assert f"\n{LAPTOP}\n" in Path("README.md").read_text(encoding="utf-8")


def test_the_loss_beside_a_unigram_models() -> None:
    assert (
        compare_to_unigram(4.8487, 6.352)
        == "held-out loss 4.849 nats per token, 1.503 below a unigram model's 6.352"
    )
    assert (
        compare_to_unigram(6.412, 6.352)
        == "held-out loss 6.412 nats per token, 0.060 above a unigram model's 6.352"
    )


def test_a_world_that_the_axes_do_not_make() -> None:
    """If the layout does not fit the world size, the remedies are the key that takes all remaining
    ranks and the planner's search."""
    config = load_config("configs/llama3_8b.yaml", [])
    with pytest.raises(UserError) as refused:
        config.validate(64)
    assert refused.value.key == "parallel.dp_shard"
    assert "parallel.dp_shard=-1 (here 64)" in refused.value.remedy
    assert "python -m tools.plan CONFIG --gpus 64 --search" in refused.value.remedy
    # the remedy works
    load_config("configs/llama3_8b.yaml", ["parallel.dp_shard=-1"]).validate(64)
    with pytest.raises(UserError) as refused:
        load_config("configs/llama3_70b.yaml", []).validate(12)
    assert refused.value.key == "parallel.tp"
    assert "a multiple of 16 processes" in refused.value.remedy
    assert "--gpus 12 --search" in refused.value.remedy


# --- interrupted commands -------------------------------------------------------------------------

LEFT = "from tools.command import run_command\nimport os, sys, time\n"


def leave(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LEFT + program], capture_output=True, text=True, timeout=300
    )


def test_ctrl_c_leaves_no_traceback_and_what_must_be_done_is() -> None:
    program = (
        "def main():\n    try: raise KeyboardInterrupt\n    finally: "
        "print('cleaned up', flush=True)\nrun_command(main)"
    )
    done = leave(program)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "cleaned up\n", "")


def test_only_the_pipe_of_standard_output_may_break_quietly() -> None:
    reader_gone = "read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
    done = leave(reader_gone + "run_command(lambda: print('x' * 100_000) or 0)")
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    done = leave("def main(): raise BrokenPipeError('of another process')\nrun_command(main)")
    assert done.returncode == 1
    assert "of another process" in done.stderr


def test_every_command_ends_so() -> None:
    for name in (
        "verify",
        "tokenizer",
        "plot",
        "profile",
        "report",
        "timeline",
        "rehearse",
        "parity",
        "plan",
    ):
        file = next(
            file
            for file in (Path(f"tools/{name}.py"), Path(f"tools/{name}/__main__.py"))
            if file.exists()
        )
        assert file.read_text(encoding="utf-8").endswith(
            'if __name__ == "__main__":\n    run_command(main)\n'
        ), name


class Slow(io.StringIO):
    """A log on a slow disk: another thread runs after each write."""

    def write(self, text: str) -> int:
        written = super().write(text)
        time.sleep(0.001)
        return written


def test_lines_of_two_threads_do_not_mix() -> None:
    """A checkpoint is reported from the thread that wrote it, between or beside lines of steps."""
    file = Slow()
    lines = ["step       3/10  loss  6.6713", "saved step-00000002: 1.1 MB"]
    threads = [
        threading.Thread(target=lambda line=line: [log(line, file) for _ in range(50)])
        for line in lines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = file.getvalue().split("\n")
    assert sorted(said) == sorted(["", *lines * 50])
