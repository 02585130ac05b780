"""The site's pages beside those of docs/; `make site` runs this (mkdocs-gen-files, mkdocs.yml).

README.md is the first page, docs/README.md the first of the tour. Every module has a page with its
documentation and its source, and every other file to which a page links has one with its text.
Links between files of the repository, which work on a code host, lead to the site's pages here.
"""

import posixpath
import re
from itertools import groupby
from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parents[2]
FIRST = {"README.md": "index.md", "docs/README.md": "tour.md"}
LINK = re.compile(r'(\]\(|\bsrc="|\bhref=")(?![a-z]+:)([^)"#\s]+)')
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)  # what is written there is no link
ROOMS = {each.parent for each in ROOT.glob("*/__init__.py")}
ROOMS -= {ROOT / name for name in ("benchmarks", "docs", "tests")}  # shown where a page links there
MODULES = sorted([*ROOT.glob("*.py"), *(file for room in ROOMS for file in room.rglob("*.py"))],
                 key=lambda file: (file.parent, file.name))  # fmt: skip


def page_of(file: Path) -> str:
    """The site's file for a file or folder of the repository."""
    path = file.relative_to(ROOT).as_posix()
    if path.startswith("docs/") and file.suffix != ".py":
        return FIRST.get(path, path.removeprefix("docs/"))
    path = FIRST.get(path, f"code/{path.lstrip('.')}")  # MkDocs leaves out what begins with a dot
    return path if path.endswith(".md") else f"{path}.md"


def text_of(file: Path) -> str:
    """The text of that page."""
    path = file.relative_to(ROOT).as_posix()
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.is_file())
        return "\n".join([f"# {path}", "", *(f"- [{name}]({file.name}/{name})" for name in names)])
    text = file.read_text("utf-8")
    if file.suffix == ".md":  # nothing is beside the site's first page
        return "---\nhide: [navigation]\n---\n" * (path == "README.md") + text
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    api = f"::: {module}\n\n## Source {{ data-search-exclude }}\n\n" * (file in MODULES)
    return f'# {path}\n\n{api}````{file.suffix[1:] or "text"} linenums="1"\n{text.rstrip()}\n````\n'


def relinked(text: str, file: Path, waiting: list[Path]) -> str:
    """`text` of `file` with links to the site's pages; files without a page are added to
    `waiting`."""

    def link(match: re.Match[str]) -> str:
        found = (file.parent / match[2]).resolve()
        found = found / "__init__.py" if (found / "__init__.py").exists() else found
        if not found.exists() or not found.is_relative_to(ROOT):
            return match[0]  # the strict build reports it
        page = page_of(found)
        if page.endswith(".md") and found not in waiting:
            waiting.append(found)
        there = posixpath.relpath(page, posixpath.dirname(page_of(file)) or ".")
        return match[1] + (there if match[1] == "](" else re.sub(r"\.md$", ".html", there))

    pieces = CODE.split(text)
    pieces[::2] = [LINK.sub(link, piece) for piece in pieces[::2]]
    return "".join(pieces)


waiting = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *MODULES]
for file in waiting:  # grows
    text = text_of(file)
    if file.suffix == ".md" or file.is_dir():
        text = relinked(text, file, waiting)
    with mkdocs_gen_files.open(page_of(file), "w") as page:
        page.write(text)
with mkdocs_gen_files.open("code/SUMMARY.md", "w") as nav:
    for folder, files in groupby(MODULES, key=lambda file: file.parent):
        nav.write(f"* {folder.relative_to(ROOT) if folder != ROOT else 'programs'}\n")
        nav.writelines(f"    * [{file.name}]({page_of(file)[5:]})\n" for file in files)
