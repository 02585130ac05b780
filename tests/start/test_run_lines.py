"""The lines that a run prints at its start and end, word for word except for computed figures; and
what becomes of a program whose output is lost."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from errors import UserError
from runtime.evaluation.listener import compare_to_unigram
from runtime.output import log
from runtime.start.topology import describe_stages
from settings.checks import validate
from settings.load import load_config
from tests import ROOT
from tests.runs import losses, status_of, write_config
from tools import objects
from tools.command import CommandParser, at_least, duration, reports_errors, table

SLOWEST = r"blocks: the slowest rank computes \d+% more than the mean \(even split: \d+%\)"
LAPTOP = r"2 stages of 2 blocks each: the slowest rank computes \d+% more than the mean"


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("laptop", "", LAPTOP),
        ("llama3_8b", "pp=4 layers_per_stage=auto", rf"4 stages of \d+, \d+, \d+, \d+ {SLOWEST}"),
        ("llama3_70b", "tp=8 pp=4 schedule=1f1b stages_per_rank=1 layers_per_stage=[20,20,21,19]",
         f"4 stages of 20, 20, 21, 19 {SLOWEST}"),
    ],
)  # fmt: skip
def test_stages(name, overrides, said):
    parallel = [f"parallel.{override}" for override in overrides.split()]
    assert re.fullmatch(said, describe_stages(load_config(f"configs/{name}.yaml", parallel)))


def test_the_readme_shows_the_same_line():
    assert re.search(rf"^{LAPTOP}$", Path("README.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("loss", "said"),
    [(4.8487, "4.849 nats per token, 1.503 below"), (6.412, "6.412 nats per token, 0.060 above")],
)
def test_the_loss_beside_a_unigram_models(loss, said):
    assert compare_to_unigram(loss, 6.352) == f"held-out loss {said} a unigram model's 6.352"


def test_a_world_that_the_axes_do_not_make():
    """The remedies are the key that takes all remaining ranks and the planner's search."""
    with pytest.raises(UserError) as refused:
        validate(load_config("configs/llama3_8b.yaml", []), 64)
    assert refused.value.key == "parallel.dp_shard"
    assert "parallel.dp_shard=-1 (here 64)" in refused.value.remedy
    assert "python -m tools.plan CONFIG --gpus 64 --search" in refused.value.remedy
    # the remedy works
    validate(load_config("configs/llama3_8b.yaml", ["parallel.dp_shard=-1"]), 64)
    with pytest.raises(UserError) as refused:
        validate(load_config("configs/llama3_70b.yaml", []), 12)
    assert refused.value.key == "parallel.tp"
    assert "a multiple of 16 processes" in refused.value.remedy
    assert "--gpus 12 --search" in refused.value.remedy


# --- interrupted commands -------------------------------------------------------------------------

LEFT = "from tools.command import run_command\nimport os, sys, time\n"


def leave(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LEFT + program], capture_output=True, text=True, timeout=300
    )


def test_ctrl_c_leaves_no_traceback_and_what_must_be_done_is():
    done = leave("""
def main():
    try: raise KeyboardInterrupt
    finally: print("cleaned up", flush=True)
run_command(main)""")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "cleaned up\n", "")


WORK = """
def main():
    for line in range(20_000): print('8 × 4', line)
    print('4 × 2', file=sys.stderr)
    open('done', 'w').close()
    return 0
"""


@pytest.mark.parametrize(
    ("shell", "status", "first"),
    [
        ("COMMAND | head -1; exit ${PIPESTATUS[0]}", 0, "8 × 4 0"),
        ("PYTHONUNBUFFERED=1 COMMAND | head -1; exit ${PIPESTATUS[0]}", 0, "8 × 4 0"),
        ("COMMAND 2>&1 >&- | head -1; exit ${PIPESTATUS[0]}", 0, "4 × 2"),
        ("COMMAND <&- >&- 2>&-", 0, ""),
        ("PYTHONIOENCODING=ascii COMMAND", 0, r"8 \xd7 4 0"),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 COMMAND", 0, r"8 \xd7 4 0"),
        ("COMMAND 2>/dev/full", 0, "8 × 4 0"),
        # its output is its result, so a script must learn that it is not there
        ("COMMAND 2>&1 >/dev/full", 1, "4 × 2"),
    ],
)
def test_whatever_becomes_of_output_the_work_is_done(tmp_path, shell, status, first):
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


def test_another_broken_pipe_is_an_error():
    done = leave("def main(): raise BrokenPipeError('of another process')\nrun_command(main)")
    assert done.returncode == 1
    assert "of another process" in done.stderr


@pytest.mark.thorough
def test_a_run_goes_on_without_a_reader_a_log_or_an_encoding(data, tmp_path):
    command = f"{sys.executable} train.py {write_config(tmp_path, data)} run.log_interval=1"
    empty = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_RESTART_COUNT", "OMP_NUM_THREADS")
    done = subprocess.run(
        ["bash", "-c", f"{command} 2>/dev/full | head -1; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONIOENCODING": "ascii"} | dict.fromkeys(empty, ""),
    )
    assert done.returncode == 0
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert status_of(tmp_path)["state"] == "finished"


SOURCES = {
    str(file): file.read_text(encoding="utf-8")
    for file in [*Path("tools").rglob("*.py"), *Path("benchmarks").rglob("*.py"), Path("train.py")]
}


def test_every_command_ends_so():
    programs = {file: text for file, text in SOURCES.items() if "\nif __name__ ==" in text}
    bare = {file for file, text in programs.items() if not text.endswith("run_command(main)\n")}
    # their output is a log, so it is no failure if it was lost
    logs = {"train.py", "tools/launch.py", "tools/torchrun/__main__.py"}
    assert all("    guard_output()\n" in programs[file] for file in logs)
    assert bare == logs
    assert len(programs) > 25


def test_every_command_has_this_parser():
    other = {file for file, text in SOURCES.items() if "argparse.ArgumentParser(" in text}
    assert other <= {"tools/command.py"}


# --- options --------------------------------------------------------------------------------------


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
def test_an_unknown_option_or_choice_names_the_nearest(words, said, capsys):
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


def test_a_path_may_begin_with_the_home_folder(monkeypatch):
    """As --out=~/x, which no shell expands."""
    monkeypatch.setenv("HOME", "/home/me")
    parser = CommandParser(prog="python -m tools.x")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text")
    found = parser.parse_args(["--out=~/x", "--text=~/x"])
    assert (found.out, found.text) == (Path("/home/me/x"), "~/x")


def test_an_option_has_the_type_of_its_default_and_states_it(capsys):
    parser = CommandParser(prog="python -m tools.x")
    parser.required("--out", Path, "DIR", "the folder to write")
    parser.option("--share", 0.5, "X", "what is kept")
    parser.option("--last", int, "N", "the newest N")
    parser.option("--force", bool, None, "replace it")
    found = parser.parse_args(["--out", "x", "--share", "1"])
    assert vars(found) == {"out": Path("x"), "share": 1.0, "last": None, "force": False}
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "--share X   what is kept (default: 0.5)" in capsys.readouterr().out


def test_an_error_that_the_user_can_fix_is_status_2(capsys):
    @reports_errors
    def main(last):
        at_least(1, last=last, max_length=None)
        return 0

    assert (main(1), main(last=0)) == (0, 2)
    said = "error: --last = 0: it must be at least 1\n  remedy: give a larger number\n"
    assert capsys.readouterr().err == said


def test_a_table_and_durations():
    rows = [("task", "shards", "said"), ("one", "10", "a b"), ("other", "7", "")]
    expected = "task   shards  said\none        10  a b\nother       7"
    assert table(rows, left=(0, 2)) == expected
    said = [duration(seconds) for seconds in (3.21, 724.9, 18_720, 273_600)]
    assert said == ["3.2 s", "12 min 4 s", "5 h 12 min", "3 d 4 h"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["push", "s3://a", "b", "--hepl"], "no option --hepl; did you mean --help?"),
        (["psuh", "s3://a"], "did you mean push?"),
    ],
)
def test_a_subcommand_checks_its_own_options(arguments, said, capsys):
    with pytest.raises(SystemExit):
        objects.main(arguments)
    assert said in capsys.readouterr().err


class Slow(io.StringIO):
    """A log on a slow disk: another thread runs after each write."""

    def write(self, text: str) -> int:
        written = super().write(text)
        time.sleep(0.001)
        return written


def test_lines_of_two_threads_do_not_mix():
    """A checkpoint is reported from the thread that wrote it, between or beside lines of steps."""
    file = Slow()
    lines = ["step       3/10  loss  6.6713", "saved step-00000002: 1.1 MB"]
    with ThreadPoolExecutor(2) as threads:
        for line in lines:
            threads.submit(lambda line=line: [log(line, file) for _ in range(50)])
    assert sorted(file.getvalue().split("\n")) == sorted(["", *lines * 50])
