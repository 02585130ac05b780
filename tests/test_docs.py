"""The documentation is true: every command of every page runs and prints what the page shows, and
every picture is what its code draws.

Commands that are not run are listed here by page and reason, and marked on the page.
tests/transcripts.py describes how pages are written.
"""

import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.recipes import PAGES as RECIPES
from tests.transcripts import (
    COMMENT,
    ROOT,
    Command,
    commands,
    commands_in_comments,
    copy_tree,
    matches,
    run,
)

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def nav(section: str) -> list[str]:
    """The pages of a section of the site, from mkdocs.yml, which lists every page once."""

    def names(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry.removesuffix(".md")]
        below = entry.values() if isinstance(entry, dict) else entry
        return [name for each in below for name in names(each)]

    listed = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return names(next(each[section] for each in listed if section in each))


TOUR = [name for name in nav("Tour") if name not in ("tour", "words", "one_step")]
# Pages with pictures that can be compared exactly; matplotlib draws the others.
DRAWN = ["words", "mesh", "tensor", "sequence", "context", "experts", "expert_mesh", "data",
         "memory", "checkpoints", "slurm", "extending"]  # fmt: skip
# Commands that are parsed but not run: page → number of commands by reason.
EXERCISE = "an exercise"  # tests/test_exercises.py runs them with answers
FIGURE = re.compile(r"\d\s?(%|[kMGT]i?B\b|bytes\b|m?s\b|seconds\b)")
NOT_RUN = {name: Counter({EXERCISE: 1}) for name in map("{}.md".format, TOUR)}
NOT_RUN["README.md"] = Counter(
    {
        "they fail until they are done": 1,
        "it draws the pictures again": 1,
        "these pages, docstrings and source as one site with search, site/index.html": 1,
    }
)
NOT_RUN["running_a_schedule.md"] = Counter({"trains for minutes": 1, "needs that run": 1})
NOT_RUN["experts.md"] += {"trains for minutes": 1}
NOT_RUN["kernels.md"] += {"needs `make data`, and minutes": 1, "needs a GPU": 1}
NOT_RUN["checkpoints.md"] += {"needs `make train`": 1}
NOT_RUN["recovery.md"] = Counter({"trains for minutes": 1})
NOT_RUN["goodput.md"] = Counter({"trains for minutes": 1})
NOT_RUN["one_writer.md"] = Counter({"takes ten minutes": 1})
NOT_RUN["elastic.md"] = Counter({"takes minutes": 1, "needs four nodes": 2, "needs Slurm": 3})
NOT_RUN["unattended.md"] = Counter({"needs Slurm": 1})
NOT_RUN["alarms.md"] = Counter(
    {"trains for a minute": 1, "needs a run": 1, "needs Prometheus": 1, "needs a cluster": 1,
     "downloads Prometheus and an S3 server": 1}
)  # fmt: skip
NOT_RUN["health.md"] = Counter({"trains for a minute": 1})
NOT_RUN["object_store.md"] = Counter(
    {"needs a store": 2, "needs that checkpoint": 1, "needs that folder": 1,
     "needs a checkpoint": 1, "needs Slurm": 1}
)  # fmt: skip
NOT_RUN["slurm.md"] += {"needs Slurm": 4}
NOT_RUN["preflight.md"] = Counter({"needs Slurm": 1})
NOT_RUN["new_cluster.md"] = Counter({"needs Slurm": 1})
NOT_RUN["huggingface.md"] = Counter(
    {"needs `make train`": 1, "needs that run": 1, "needs those weights": 2, "needs them too": 2}
)
NOT_RUN["streams.md"] = Counter({"takes a minute": 1, "needs that run": 1})
NOT_RUN["profiling.md"] = Counter({"trains for a minute": 1, "needs that run": 3})
NOT_RUN["planning.md"] = Counter({"takes a while": 3, "takes half a minute": 1})
NOT_RUN["plan_accuracy.md"] = Counter({"takes a while": 1, "takes a minute": 1})
NOT_RUN["install.md"] = Counter({"trains for minutes": 1, "needs `make train`": 1})
NOT_RUN["your_data.md"] = Counter(
    {"needs your text": 3, "needs those weights": 1, "needs that run": 1}
)
NOT_RUN["longer_sequences.md"] = Counter(
    {"needs Slurm": 1, "needs that run": 1, "takes a minute": 1}
)
NOT_RUN["stages.md"] = Counter({"trains for a minute": 1})
NOT_RUN["running.md"] = Counter(
    {"needs 8 GPUs": 1, "needs two machines": 1, "needs root, and your network": 1,
     "needs Slurm": 2, "takes a while": 1, "takes half a minute": 1}
)  # fmt: skip
NOT_RUN["evaluation.md"] = Counter({"trains for minutes": 1, "needs that run": 3})
NOT_RUN["configuration.md"] = Counter({"needs that run": 1, "takes a minute": 1, "needs a GPU": 1})
# limits for a page of the manual, to be read in ten minutes, and for the front page
WORDS, README_LINES = 1200, 120

ALL = {page.name: commands(page) for page in PAGES}
# tests/test_recipes.py runs the commands of the recipes, in a copy that has their edits.
RUN = {
    str(c): c for name, found in ALL.items() for c in found if not c.not_run and name not in RECIPES
}
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
RUN |= {str(c): c for file in CONFIGS for c in commands_in_comments(file)}
TAKES_LONG = re.compile(r"for cp in 1 4|llama3_70b\.yaml --search")  # over ten seconds


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("docs"))


printed: dict[str, str] = {}  # command → its output


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, id=name, marks=[pytest.mark.thorough] * bool(TAKES_LONG.search(name)))
        for name, c in RUN.items()
    ],
)
def test_a_command_prints_what_the_page_shows(command: Command, copy: Path) -> None:
    if command.text not in printed:
        status, output, errors = run(command.text, copy)
        assert status == 0, f"{command}: status {status}\n{output}{errors}"
        printed[command.text] = output
    if command.output is not None:
        assert matches(command.output, printed[command.text]), (
            f"{command} printed\n{printed[command.text]}"
        )


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_configuration_states_no_figure_that_nothing_prints(file: Path) -> None:
    """In comments of a configuration, bytes, seconds and percentages occur only in the output of
    commands, which the test above checks. GPU names and bytes per parameter are excepted
    (tests/test_configs.py checks the latter)."""
    assert file.stem.startswith("laptop") or commands_in_comments(file)
    for line in file.read_text(encoding="utf-8").splitlines():
        prose = line.partition("#")[2].replace("GPUs of 80 GB", "")
        if not line.startswith(COMMENT) and "bytes per parameter" not in line:
            assert not FIGURE.search(prose), line


def test_a_figure_is_found() -> None:
    """Control: the pattern finds figures of all these forms."""
    for text in (
        "would be 48 GB",
        "10.5% of a step",
        "39 kB",
        "takes 15.1 s",
        "1.5 ms",
        "6 bytes × 8",
    ):
        assert FIGURE.search(text), text


def test_what_is_not_run_is_listed() -> None:
    found = {
        page: Counter(c.not_run for c in of_page if c.not_run) for page, of_page in ALL.items()
    }
    assert {page: reasons for page, reasons in found.items() if reasons} == NOT_RUN


def test_the_front_page_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES
    assert [c.text.split("#")[0].strip() for c in commands(ROOT / "README.md")] == [
        "make train",
        "make test",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_read_in_ten_minutes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS
    if page.name != "README.md":
        assert f"({page.name})" in (DOCS / "README.md").read_text(encoding="utf-8")


def test_the_site_has_every_page_once() -> None:
    sections = ("Tour", "Manual", "Reference", "Recipes")
    listed = sorted(name for section in sections for name in nav(section))
    assert listed == sorted([*(page.stem for page in PAGES if page.name != "README.md"), "tour"])
    assert [f"{name}.md" for name in nav("Recipes")] == [Path(page).name for page in RECIPES]


@pytest.mark.parametrize("name", TOUR)
def test_a_page_of_the_tour_is_whole(name: str) -> None:
    """Every page of the tour has a picture, a command with output, and exercises."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^]]+\]\(images/(\w+)\.svg\)", text)
    assert pictures
    assert all((DOCS / "images" / f"{picture}.svg").exists() for picture in pictures)
    assert any(c.output for c in ALL[f"{name}.md"])
    assert f"exercises/test_{name}.py" in text


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_its_code_draws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored picture equals what its code draws. If this fails, run `make docs` and inspect the
    picture."""
    monkeypatch.chdir(ROOT)
    drawn = importlib.import_module(f"docs.draw_{name}").draw()
    assert drawn == (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")


def test_make_docs_draws_every_picture() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {file.stem for file in DOCS.glob("draw_*.py")} == set(
        re.findall(r"-m docs\.(draw_\w+)", makefile)
    )


def test_an_output_that_is_no_longer_true_is_found() -> None:
    """Control: output that differs from what a page shows is found."""
    shown = "step 1 of 3\n…\nloss … nats\n"
    assert matches(shown, "step 1 of 3\nloss 4.2 nats\n")
    assert matches(shown, "step 1 of 3\nstep 2 of 3\n\nstep 3 of 3\nloss 4.2 nats\n")
    assert not matches(shown, "step 1 of 4\nloss 4.2 nats\n")
    assert not matches(shown, "step 1 of 3\nloss 4.2 nats\nand more\n")
    assert not matches("1 2 3", "1 2 4")


def test_pages_are_parsed_as_they_are_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n```console\n$ python - <<'end'\nprint(1)\nend\n1\n$ ls \\\n    -l   "
        "# not run: for show\n```\n"
        "```bash\n# why\nls a \\\n  b\nls c\n```\n```python\nx = 1\n```\n"
    )
    first, second, third, fourth = commands(page)
    assert (first.line, first.text, first.output) == (3, "python - <<'end'\nprint(1)\nend", "1")
    assert (second.line, second.text, second.not_run) == (7, "ls \\\n    -l", "for show")
    assert (third.line, third.text, third.output) == (12, "ls a \\\n  b", None)
    assert (fourth.line, fourth.text) == (14, "ls c")
