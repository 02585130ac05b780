"""The lines that a run prints at its start and end, word for word except for computed figures; and
what becomes of a program whose output is lost."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.evaluation.listener import compare_to_unigram
from runtime.output import log
from runtime.start.announce import describe_stages
from settings.load import load_config
from tests import ROOT
from tests.runs import losses, status_of, write_config
from tools.command import CommandParser


def test_stages():
    """The README shows the first line."""
    slowest = r"the slowest rank computes \d+% more than the mean"
    even = f"2 stages of 2 blocks each: {slowest}"
    assert re.fullmatch(even, describe_stages(load_config("configs/laptop.yaml", [])))
    assert re.search(f"^{even}$", Path("README.md").read_text(encoding="utf-8"), re.MULTILINE)
    uneven = ["parallel.pp=4", "parallel.layers_per_stage=auto"]
    said = describe_stages(load_config("configs/llama3_8b.yaml", uneven))
    split = r"4 stages of \d+, \d+, \d+, \d+ blocks"
    assert re.fullmatch(rf"{split}: {slowest} \(even split: \d+%\)", said)


def test_the_loss_beside_a_unigram_models():
    said = "held-out loss 4.849 nats per token, 1.503 below a unigram model's 6.352"
    assert compare_to_unigram(4.8487, 6.352) == said
    assert "6.412 nats per token, 0.060 above" in compare_to_unigram(6.412, 6.352)


LEFT = "from tools.command import run_command\nimport signal, sys\n"


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("KeyboardInterrupt", -signal.SIGINT, ""),
        # which does not end it, as the first process of a container
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [2]) or KeyboardInterrupt", 130, ""),
        ("BrokenPipeError('of another process')", 1, "of another process"),
    ],
)
def test_ctrl_c_leaves_no_traceback_and_what_must_be_done_is(fault, status, said):
    """Another broken pipe than that of the command's output is an error."""
    program = f"""{LEFT}
def main():
    try: raise {fault}
    finally: print("cleaned up", flush=True)
run_command(main)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "cleaned up\n")
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)


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
        ("COMMAND 2>&1 >&- | head -1; exit ${PIPESTATUS[0]}", 0, "4 × 2"),
        ("COMMAND <&- >&- 2>&-", 0, ""),
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
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
        capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert (done.returncode, done.stdout.partition("\n")[0]) == (status, first), done.stderr
    assert (tmp_path / "done").exists()
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.thorough
def test_a_run_goes_on_without_a_reader_a_log_or_an_encoding(data, tmp_path):
    command = f"{sys.executable} train.py {write_config(tmp_path, data)} run.log_interval=1"
    empty = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_RESTART_COUNT", "OMP_NUM_THREADS")
    done = subprocess.run(
        ["bash", "-c", f"{command} 2>/dev/full | head -1; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"} | dict.fromkeys(empty, ""),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert status_of(tmp_path)["state"] == "finished"


def test_every_command_ends_so_and_has_this_parser():
    files = [*Path("tools").rglob("*.py"), *Path("benchmarks").rglob("*.py"), Path("train.py")]
    sources = {str(file): file.read_text(encoding="utf-8") for file in files}
    programs = {file: text for file, text in sources.items() if "\nif __name__ ==" in text}
    bare = {file for file, text in programs.items() if not text.endswith("run_command(main)\n")}
    # their output is a log, so it is no failure if it was lost
    logs = {"train.py", "tools/launch.py", "tools/torchrun/__main__.py"}
    assert all("    guard_output()\n" in programs[file] for file in logs)
    assert bare == logs
    assert not [file for file, text in sources.items() if "argparse.ArgumentParser(" in text]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tokenizer x --skp missing", "unrecognized arguments: --skp missing"),
        ("--tok=x", "the following arguments are required: --tokenizer"),  # no abbreviations
    ],
)
def test_a_wrong_option_is_refused_in_one_line(words, said, capsys):
    parser = CommandParser(prog="python -m tools.x", description="What it does.")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--skip", nargs="+")
    for parse in (parser.parse_args, parser.parse_intermixed_args):
        with pytest.raises(SystemExit) as ended:
            parse(words.split())
        error = capsys.readouterr().err
        assert ended.value.code == 2
        assert error.startswith(f"error: {said}")
        assert error.endswith(" (help: python -m tools.x --help)\n")
        assert error.count("\n") == 1


def test_an_option_has_the_type_of_its_default_and_states_it(monkeypatch, capsys):
    """No shell expands the ~ of --out=~/x, so paths do."""
    monkeypatch.setenv("HOME", "/home/me")
    parser = CommandParser(prog="python -m tools.x")
    parser.required("--out", Path, "DIR", "the folder to write")
    parser.option("--share", 0.5, "X", "what is kept")
    parser.option("--last", int, "N", "the newest N")
    parser.option("--force", bool, None, "replace it")
    parser.option("--of", str, "N", "some of it", nargs="+")  # which may be repeated
    found = parser.parse_args(["--out=~/x", "--share", "1", "--of", "a", "b", "--of", "c"])
    expected = {"out": Path("/home/me/x"), "share": 1.0, "last": None, "force": False}
    expected |= {"of": ["a", "b", "c"]}
    assert vars(found) == expected
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "--share X       what is kept (default: 0.5)" in capsys.readouterr().out


def test_lines_of_two_threads_do_not_mix():
    """A line and its end are one write: a checkpoint is reported from the thread that wrote it,
    beside lines of steps."""
    written = []
    log("saved step-00000002: 1.1 MB", SimpleNamespace(write=written.append, flush=lambda: None))
    assert written == ["saved step-00000002: 1.1 MB\n"]
