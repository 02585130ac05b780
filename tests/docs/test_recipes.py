"""The recipes in docs/ work: make the edits that the pages show in a copy of the repository, then
run the pages' commands.

Each recipe must apply to the repository as it is. The commands run in one copy that has the edits
of all recipes. If `apply` fails, the code that a recipe changes has changed: update the page too.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from docs.recipes import Edit, Recipe, recipes
from tests import ROOT
from tests.docs.transcripts import Command, commands, copy_tree, matches, run_in_copy

RECIPES = list(recipes(ROOT / "docs"))


def commands_of(recipe: Recipe) -> list[Command]:
    return [command for command in commands(recipe.page) if not command.not_run]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the edits of all recipes."""
    copy = copy_tree(tmp_path_factory.mktemp("recipes"))
    for recipe in RECIPES:
        for edit in recipe.edits:
            edit.apply(copy)
    return copy


@pytest.fixture(scope="module")
def printed(changed: Path) -> dict[str, tuple[int, str, str]]:
    """Command → status, output, errors, for all recipes."""
    wanted = [command.text for recipe in RECIPES for command in commands_of(recipe)]
    return dict(zip(wanted, run_in_copy(wanted, changed), strict=True))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_fits_the_repository_as_it_is(recipe: Recipe, tmp_path: Path) -> None:
    for path in {edit.path for edit in recipe.edits}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).exists():
            shutil.copy(ROOT / path, tmp_path / path)
    for edit in recipe.edits:
        edit.apply(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_proves_what_the_page_says(
    recipe: Recipe, printed: dict[str, tuple[int, str, str]]
) -> None:
    mine = commands_of(recipe)
    assert any(command.output for command in mine), "a recipe must end with a proof"
    for command in mine:
        status, output, errors = printed[command.text]
        assert status == 0, f"{command}: status {status}\n{output}{errors}"
        assert matches(command.output or "", output), f"{command} printed\n{output}"


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_cluster_s_scripts_pass_shellcheck(changed: Path) -> None:
    scripts = ["slurm/train_70b.sh", "slurm/environment.sh"]
    done = subprocess.run(
        ["shellcheck", "--external-sources", *scripts], cwd=changed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_there_is_a_recipe_for_each_kind_of_change() -> None:
    kinds = [recipe.name.split(":")[0] for recipe in RECIPES]
    assert kinds == [
        "A layer",
        "A router",
        "A schedule",
        "A source of text",
        "An optimizer",
        "An axis",
        "A listener",
        "A cluster",
    ]


def test_an_edit_that_no_longer_fits_is_refused(tmp_path: Path) -> None:
    """Control: an edit is refused if the lines to replace occur nowhere, or twice."""
    file = tmp_path / "a.py"
    file.write_text("x = 1\ny = 2\nx = 1\n")
    for block in ("-z = 3\n+z = 4\n", "-x = 1\n+x = 2\n"):
        with pytest.raises(ValueError, match=r"a\.py has this [02] times"):
            Edit("In", "a.py", block).apply(tmp_path)
    Edit("In", "a.py", "-y = 2\n+y = 3\n x = 1\n").apply(tmp_path)
    Edit("Append to", "a.py", "z = 4\n").apply(tmp_path)
    assert file.read_text() == "x = 1\ny = 3\nx = 1\n\n\nz = 4\n"
