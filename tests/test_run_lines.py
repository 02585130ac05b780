"""The lines that a run prints at its start and end, word for word except for computed figures; and
what becomes of a program whose output is lost."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from errors import UserError
from output import log
from runtime.evaluation import compare_to_unigram
from runtime.start.topology import describe_stages
from tests.runs import losses, status_of, write_config
from tools import objects
from tools.command import CommandParser
from training.load_config import load_config

ROOT = Path(__file__).parent.parent

LAPTOP = r"2 stages of 2 blocks each: the slowest rank computes \d+% more than the mean"


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("laptop", "", LAPTOP),
        (
            "llama3_8b",
            "parallel.pp=4 parallel.layers_per_stage=auto",
            r"4 stages of \d+, \d+, \d+, \d+ blocks: the slowest rank computes \d+% more "
            r"than the mean \(even split: \d+%\)",
        ),
        (
            "llama3_70b",
            "parallel.tp=8 parallel.pp=4 parallel.schedule=1f1b parallel.stages_per_rank=1 "
            "parallel.layers_per_stage=[20,20,21,19]",
            r"4 stages of 20, 20, 21, 19 blocks: the slowest rank computes \d+% more than the mean "
            r"\(even split: \d+%\)",
        ),
    ],
)
def test_stages(name: str, overrides: str, said: str) -> None:
    found = describe_stages(load_config(f"configs/{name}.yaml", overrides.split()))
    assert re.fullmatch(said, found)


def test_the_readme_shows_the_same_line() -> None:
    assert re.search(rf"^{LAPTOP}$", Path("README.md").read_text(encoding="utf-8"), re.MULTILINE)


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


WORK = """
def main():
    for line in range(20_000): print('8 × 4', line)
    print('4 × 2', file=sys.stderr)
    open('done', 'w').close()
    return 0
"""
OUTPUTS = [  # how a shell starts it, its status, the first line that is shown
    ("COMMAND | head -1; exit ${PIPESTATUS[0]}", 0, "8 × 4 0"),
    ("PYTHONUNBUFFERED=1 COMMAND | head -1; exit ${PIPESTATUS[0]}", 0, "8 × 4 0"),
    ("COMMAND 2>&1 >&- | head -1; exit ${PIPESTATUS[0]}", 0, "4 × 2"),
    ("COMMAND <&- >&- 2>&-", 0, ""),
    ("PYTHONIOENCODING=ascii COMMAND", 0, r"8 \xd7 4 0"),
    ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 COMMAND", 0, r"8 \xd7 4 0"),
    ("COMMAND 2>/dev/full", 0, "8 × 4 0"),
    # its output is its result, so a script must learn that it is not there
    ("COMMAND 2>&1 >/dev/full", 1, "4 × 2"),
]


@pytest.mark.parametrize(("shell", "status", "first"), OUTPUTS)
def test_whatever_becomes_of_output_the_work_is_done(
    tmp_path: Path, shell: str, status: int, first: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEFT + WORK + "run_command(main)", encoding="utf-8")
    done = subprocess.run(
        ["bash", "-c", shell.replace("COMMAND", f"{sys.executable} {program}")],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
    )
    assert (done.returncode, done.stdout.partition("\n")[0]) == (status, first), done.stderr
    assert (tmp_path / "done").exists()
    assert "Traceback" not in done.stderr + done.stdout


def test_another_broken_pipe_is_an_error() -> None:
    done = leave("def main(): raise BrokenPipeError('of another process')\nrun_command(main)")
    assert done.returncode == 1
    assert "of another process" in done.stderr


@pytest.mark.thorough
def test_a_run_goes_on_without_a_reader_a_log_or_an_encoding(data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data)
    command = f"{sys.executable} train.py {config} run.log_interval=1 2>/dev/full | head -1"
    empty = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_RESTART_COUNT", "OMP_NUM_THREADS")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"} | dict.fromkeys(empty, "")
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    assert done.returncode == 0
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert status_of(tmp_path)["state"] == "finished"


def test_every_command_ends_so() -> None:
    files = [file for room in ("tools", "benchmarks") for file in Path(room).rglob("*.py")]
    texts = {str(file): file.read_text(encoding="utf-8") for file in [*files, Path("train.py")]}
    programs = {file: text for file, text in texts.items() if "\nif __name__ ==" in text}
    bare = {file for file, text in programs.items() if not text.endswith("run_command(main)\n")}
    # their output is a log, so it is no failure if it was lost
    logs = {"train.py", "tools/launch.py", "tools/torchrun/__main__.py"}
    assert all('if __name__ == "__main__":' in texts[file] for file in logs)
    assert all("    guard_output()\n" in texts[file] for file in logs)
    # these two stand for train.py
    assert bare - logs == {"benchmarks/elastic_rank.py", "benchmarks/restart_marks.py"}
    assert len(programs) > 40


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tokeniser x", "there is no option --tokeniser; did you mean --tokenizer?"),
        ("--tok=x", "there is no option --tok; did you mean --tokenizer?"),  # no abbreviations
        ("-tokenizer x", "there is no option -tokenizer; did you mean --tokenizer?"),
        ("--zzz", "there is no option --zzz"),
        ("--tokenizer x --skip damage", "; did you mean damaged?"),
        ("a", "the following arguments are required: --tokenizer"),
    ],
)
def test_an_unknown_option_or_choice_names_the_nearest(words: str, said: str, capsys) -> None:
    parser = CommandParser(prog="python -m tools.x", description="What it does.")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--offset", type=int)
    parser.add_argument("--skip", nargs="+", choices=["missing", "damaged"])
    for parse in (parser.parse_args, parser.parse_intermixed_args):
        with pytest.raises(SystemExit) as ended:
            parse(words.split())
        error = capsys.readouterr().err
        assert ended.value.code == 2
        assert error.startswith("error: ")
        assert error.endswith(f"{said} (help: python -m tools.x --help)\n")
        assert error.count("\n") == 1
    fine = ["--tokenizer", "-- a value", "--offset", "-3"]
    assert parser.parse_args(fine).tokenizer == "-- a value"


def test_a_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As --out=~/x, which no shell expands."""
    monkeypatch.setenv("HOME", "/home/me")
    parser = CommandParser(prog="python -m tools.x")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text")
    found = parser.parse_args(["--out=~/x", "--text=~/x"])
    assert (found.out, found.text) == (Path("/home/me/x"), "~/x")


def test_a_subcommand_checks_its_own_options(capsys) -> None:
    with pytest.raises(SystemExit):
        objects.main(["push", "s3://a", "b", "--hepl"])
    assert "no option --hepl; did you mean --help?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        objects.main(["psuh", "s3://a"])
    assert "did you mean push?" in capsys.readouterr().err


def test_every_command_has_this_parser() -> None:
    for file in [*Path("tools").rglob("*.py"), *Path("benchmarks").rglob("*.py")]:
        if file != Path("tools/command.py"):
            assert "argparse.ArgumentParser(" not in file.read_text(encoding="utf-8"), file


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
