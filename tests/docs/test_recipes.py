"""The recipes in docs/recipes work: apply the patches to a copy of the repository, then run the
commands of the pages that explain them.

Each patch must apply to the repository as it is. The commands run in one copy that has all patches.
If one no longer applies, the code that it changes has changed: `bash docs/recipes/rebase.sh`.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.docs.transcripts import copy_tree, in_bash

RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.patch"))
PAGES = sorted((ROOT / "docs").glob("recipes_*.md"))


def git(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(
        ["git", *author, *map(str, arguments)], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_fits_the_repository_as_it_is(recipe: Path) -> None:
    done = git(ROOT, "apply", "--check", recipe)
    assert done.returncode == 0, f"{done.stderr}\n`bash docs/recipes/rebase.sh` may help"


@pytest.mark.thorough
def test_recipes_prove_what_their_pages_say(tmp_path: Path) -> None:
    changed = copy_tree(tmp_path)
    done = git(changed, "apply", *RECIPES)
    assert done.returncode == 0, done.stderr
    status, output, errors = in_bash("python -m tests.docs.transcripts docs/recipes_*.md", changed)
    assert status == 0, output + errors


def test_each_recipe_has_a_page_that_proves_it() -> None:
    """A section of a page links to the patch, and has a command whose output is compared."""
    sections = [part for page in PAGES for part in page.read_text("utf-8").split("\n## ")]
    for recipe in RECIPES:
        (section,) = [part for part in sections if f"](recipes/{recipe.name})" in part]
        assert "```console\n$ " in section, recipe.stem


def test_recipes_are_fitted_to_changed_code(tmp_path: Path) -> None:
    """rebase.sh: a patch whose context has changed applies again; one whose own line has changed is
    left as it was, and named."""
    recipes = tmp_path / "docs" / "recipes"
    recipes.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "recipes" / "rebase.sh", recipes)
    code = tmp_path / "code.py"
    lines = [f"line_{i} = {i}\n" for i in range(20)]

    def write(changes: dict[int, str]) -> None:
        code.write_text("".join(changes.get(i, line) for i, line in enumerate(lines)), "utf-8")

    def commit() -> None:
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "-m", "text")

    write({})
    git(tmp_path, "init", "--quiet")
    commit()
    for name, at in {"moves": 4, "conflicts": 16}.items():
        write({at: "changed = True\n"})
        patch = git(tmp_path, "diff", "--full-index").stdout
        (recipes / f"{name}.patch").write_text(patch, "utf-8")
    write({2: "another = 2\n", 16: "other = 16\n"})
    assert git(tmp_path, "apply", "--check", recipes / "moves.patch").returncode  # control
    commit()
    done = subprocess.run(
        ["bash", recipes / "rebase.sh"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "conflicts.patch: conflicts with the code" in done.stdout
    assert git(tmp_path, "apply", "--check", recipes / "moves.patch").returncode == 0
    assert "-line_16 = 16" in (recipes / "conflicts.patch").read_text("utf-8")
    assert git(tmp_path, "worktree", "list").stdout.count("\n") == 1
