"""Every configuration and command line is refused with one message or works: tried on thousands,
drawn from the JSON schema, from values that are known to cause trouble, and from noise. (Variables
of the environment: test_init_distributed.py; streams that take no output: test_run_lines.py.)

`make test` tries a few of them, `make test-all` over two thousand. Each test prints the number of
cases and of refusals, and the seconds.
"""

import contextlib
import io
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from costs.summary import flops_per_token
from errors import UserError
from model.transformer import num_parameters
from proofs.ranks import Ranks
from settings import checks
from settings.config import Config
from settings.layouts import valid_layout
from settings.load import dump_config, load_config
from tests.data_samples import prepared
from tests.runs import said_by, status_of, train_run, write_config
from tests.settings.config_cases import (
    LAPTOP,
    NAMES,
    RAW,
    REFUSED,
    command_line,
    damaged_file,
    layouts,
    override,
    run_overrides,
    typed,
)
from tools.plan import __main__ as plan
from tools.rehearse import __main__ as rehearse
from tools.timeline import __main__ as timeline

MOST_SECONDS = 10  # of CPU time per case; an idle machine needs at most 5
short = settings(
    max_examples=75, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
long = settings(short, max_examples=400, derandomize=False, phases=[Phase.generate])


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """A case that takes MOST_SECONDS of this process's CPU time fails."""
    signal.signal(signal.SIGPROF, lambda *_: pytest.fail(f"it takes over {MOST_SECONDS} s"))
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def outcome(path: Path, overrides: list[str], world: int) -> Config | None:
    """The configuration, or None if it was refused correctly, with one complete message."""
    try:
        return valid_layout(load_config(str(path), overrides), world)[0]
    except UserError as refused:
        check_message(refused)
        return None


def check_message(error: UserError) -> None:
    message = str(error)
    assert message.count("\n  remedy: ") == 1
    assert all([error.key, error.why, error.remedy])
    assert len(message) < 5000
    assert "\x1b" not in message


def written_reads_back(config: Config, path: Path) -> None:
    written = path.with_name("dumped.yaml")
    written.write_text(dump_config(config), encoding="utf-8")
    assert repr(load_config(str(written), [])) == repr(config)


def is_valid(path: Path, overrides: list[str], world: int) -> bool:
    """Whether it is valid: then, what a run and the tools derive from it before they compute
    anything is checked too."""
    config = outcome(path, overrides, world)
    if config is None:
        return False
    written_reads_back(config, path)
    world = config.parallel.num_ranks if config.parallel.layouts else world
    layers = config.split_layers()
    assert [layer for stage in layers for layer in stage] == list(range(config.model.num_layers))
    schedule = config.schedule(config.parallel.mesh_sizes(world).dp)
    assert len(schedule) == config.parallel.pp
    assert num_parameters(config.model) > 0
    assert flops_per_token(config.model, config.train.seq_len) > 0
    return True


def drawn_keys(base: Path, case: tuple[list[str], int]) -> bool:
    overrides, world = case
    small = ["parallel.tp=1", "parallel.pp=1"] if world < 4 else []
    return is_valid(base, ["parallel.dp_shard=-1", *small, *overrides], world)


def noise(base: Path, case: tuple[tuple[str, str], str, bool]) -> bool:
    name, text, at_a_key = case
    return is_valid(base, [f"{'.'.join(name)}={text}" if at_a_key else text], 8)


def damaged(base: Path, content: bytes) -> bool:
    path = base.with_name("damaged.yaml")
    path.write_bytes(content)
    return is_valid(path, [], 8)


def arrives(base: Path, case: tuple[str, str, Any]) -> bool:
    key, text, value = case
    config = outcome(base, [f"{key}={text}"], 8)
    assert (config is None) == (value is REFUSED)
    if config is not None:
        section, _, name = key.partition(".")
        assert getattr(getattr(config, section), name) == value
        written_reads_back(config, base)
    return config is not None


# Each tool, and its functions that take long, after all checks.
TOOLS: dict[str, tuple[Any, list[str]]] = {
    "plan": (plan, ["summarise", "search", "describe_layouts"]),
    "rehearse": (rehearse, ["alone"]),
    "timeline": (timeline, []),
}


class Begun(Exception):
    """Raised in place of work that takes long."""


def works(_: Path, command: tuple[str, list[str]]) -> bool:
    (tool, long_work), arguments = TOOLS[command[0]], command[1]
    said, status = io.StringIO(), None
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(said))
        for work in long_work:
            stack.enter_context(patch.object(tool, work, side_effect=Begun))
        try:
            status = tool.main(arguments)
        except Begun:
            return True
        except SystemExit as leaving:  # of argparse
            status = leaving.code
    assert status in (0, 2)
    if status:
        assert said.getvalue().startswith("error: ")
        assert said.getvalue().count("\n") == 1 + ("\n  remedy: " in said.getvalue())
    return not status


def same_verdict(base: Path, case: list[dict[str, Any]]) -> bool:
    """Training, the planner and the rehearsal agree on a list of layouts."""
    override = f"parallel.layouts={json.dumps(case)}"
    valid = outcome(base, [override], 8) is not None
    for tool in ("plan", "rehearse"):
        assert works(base, (tool, [str(base), override])) == valid, tool
    return valid


KINDS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Path, Any], bool]]] = {
    "keys": (
        st.tuples(st.lists(override(), min_size=1, max_size=3), st.sampled_from([1, 2, 3, 8, 64])),
        drawn_keys,
    ),
    "noise on the command line": (
        st.tuples(st.sampled_from(NAMES) | st.just(("run", "on_event")), RAW, st.booleans()),
        noise,
    ),
    "damaged files": (damaged_file(), damaged),
    "typed values": (typed(), arrives),
    "layouts": (layouts(), same_verdict),
    "commands": (command_line(), works),
}


def fuzz(kind: str, folder: Path, effort: settings) -> None:
    base = folder / "laptop.yaml"
    base.write_bytes(LAPTOP.read_bytes())
    cases, try_one = KINDS[kind]
    count, began = Counter[bool](), time.perf_counter()

    @effort
    @given(cases)
    def run(case: Any) -> None:
        with limited():
            count[try_one(base, case)] += 1

    run()
    print(
        f"fuzz of the configuration, {kind}: {count.total()} cases, {count[False]} refused, "
        f"{count[True]} valid, no failure, {time.perf_counter() - began:.1f} s"
    )
    assert count[False]
    assert count[True]
    written = {path.name for path in folder.iterdir()}
    assert written <= {"laptop.yaml", "dumped.yaml", "damaged.yaml"}, "nothing is written"


@pytest.mark.parametrize(
    "effort", [short, pytest.param(long, marks=pytest.mark.thorough)], ids=["few", "thousands"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_message_or_it_works(kind: str, effort: settings, tmp_path: Path) -> None:
    fuzz(kind, tmp_path, effort)


@pytest.mark.thorough
def test_the_fuzz_would_find_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a planted validation step that divides by unchecked values is found. About one case
    in ten draws one of these keys."""

    def careless(config: Config, sizes: object) -> None:
        optimizer = config.optimizer
        values = (optimizer.grad_clip, optimizer.weight_decay, *vars(config.guard).values())
        _ = [1 / value for value in values if isinstance(value, int | float)]

    monkeypatch.setattr(checks, "CHECKS", [careless, *checks.CHECKS])
    effort = settings(short, max_examples=2000, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(ZeroDivisionError):
        fuzz("keys", tmp_path, effort)


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_what_is_valid_runs(ranks: Ranks, tmp_path: Path, count: int) -> None:
    """Each run must reach its last step, be refused with a message, or end with the error of a
    diverging run."""
    data = prepared(tmp_path / "data")
    sizes = {"steps": 3, "seq_len": 16, "global_batch_size": 4, "micro_batch_size": 2}
    ends: Counter[str] = Counter()
    began = time.perf_counter()

    @settings(short, max_examples=count, phases=[Phase.generate])
    @given(run_overrides())
    def run(overrides: list[str]) -> None:
        here = Path(tempfile.mkdtemp(dir=tmp_path))
        base = write_config(here, data, train=sizes)
        (message,) = ranks.run(said_by, 1, train_run, [base, *overrides])
        if message.startswith("RunFailed: "):
            ends["diverged"] += 1
            return
        ends["refused" if message else "finished"] += 1
        if message:
            assert "\n  remedy: " in message, (overrides, message)
            assert not (here / "run").exists()
        else:
            status = status_of(here)
            assert (status["state"], status["step"]) == ("finished", 3)

    run()
    print(
        f"fuzz of the configuration, runs: {dict(ends)}, no failure, "
        f"{time.perf_counter() - began:.1f} s"
    )
    assert ends["finished"]
