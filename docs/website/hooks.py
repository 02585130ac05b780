"""What MkDocs does not do by itself for `make site` (mkdocs.yml; https://www.mkdocs.org/user-guide/
configuration/#hooks).

- README.md is the site's first page, docs/README.md the first page of the tour.
- Every Python module gets a page with its documentation and its source. Every other file that a
  page links to gets a page with its text.
- Links in pages are relative to the repository, so that they work on a code host; here they become
  links between the site's pages.
- `<!-- timeline: 1f1b zb_v -->` in a page becomes a timeline of these schedules through which the
  reader can step (timeline.js), from the schedules' own actions (timelines.py).
"""

import html
import json
import posixpath
import re
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from docs.website.timelines import timelines

ROOT = Path(__file__).resolve().parents[2]
# folders and programs whose modules are documented; tests, benchmarks and pages are only shown
DOCUMENTED = ("model", "parallel", "training", "data", "runtime", "costs", "tools", "proofs")
LINK = re.compile(r"(\]\(|\bsrc=\"|\bhref=\")([^)\"\s]+)")
FIRST = "---\nhide: [navigation]\n---\n"  # nothing is beside the site's first page
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
TIMELINE = re.compile(r"^<!-- timeline: ([\w ]+) -->$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml"}
RENAMED = {"README.md": "index.md", "docs/README.md": "tour.md"}


def page_of(path: str) -> str:
    """The site's file for a file of the repository."""
    if path in RENAMED:
        return RENAMED[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return f"code/{path}" if path.endswith(".md") else f"code/{path}.md"


def file_of(link: str, source: str) -> str:
    """The file or folder to which `link` leads in the file `source`, both in the repository; for a
    package, its __init__.py. The empty string if it does not exist."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if (ROOT / path / "__init__.py").is_file():
        return f"{path}/__init__.py"
    return path if (ROOT / path).exists() else ""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The code comes after the pages."""
    assert config.nav is not None
    folders: dict[str, list[str]] = {}
    for path in documented():
        folders.setdefault(str(Path(path).parent), []).append(page_of(path))
    programs = folders.pop(".")
    config.nav.append({"Code": [{"programs": programs}, *({k: v} for k, v in folders.items())]})
    return config


@cache
def documented() -> list[str]:
    """The Python files that have a page whether or not one links to them: programs and modules."""
    modules = [file for folder in DOCUMENTED for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file.relative_to(ROOT).as_posix() for file in [*sorted(ROOT.glob("*.py")), *modules]]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of code, made from the files that exist or are linked to."""
    for path, page in RENAMED.items():
        text = (ROOT / path).read_text("utf-8")
        head = FIRST if page == "index.md" else ""
        files.append(File.generated(config, page, content=head + text))
    for path in documented():
        files.append(File.generated(config, page_of(path), content=shown(path)))
    pages = [file for file in files.documentation_pages() if file.inclusion.is_included()]
    for page in pages:  # grows: a page that is linked to may have links itself
        path = source_of(page.src_uri)
        for link in links(page.content_string) if has_links(path) else ():
            found = file_of(link, path)
            if found and files.get_file_from_path(page_of(found)) is None:
                file = File.generated(config, page_of(found), content=shown(found))
                file.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(file)
                pages.append(file)
    return files


def has_links(path: str) -> bool:
    """Whether the page of a file or folder has links between files of the repository."""
    return path.endswith(".md") or (ROOT / path).is_dir()


def links(text: str) -> list[str]:
    """The paths to which a page links; what is written in blocks of code is no link."""
    prose = CODE.sub("", text)
    parts = (urlsplit(link) for _, link in LINK.findall(prose))
    return [each.path for each in parts if each.path and not each.scheme]


def source_of(page: str) -> str:
    """The file of the repository behind a page of the site."""
    for path, renamed in RENAMED.items():
        if page == renamed:
            return path
    if page.startswith("code/"):
        path = page.removeprefix("code/")
        return path if (ROOT / path).exists() else path.removesuffix(".md")
    return f"docs/{page}"


def shown(path: str) -> str:
    """The text of a page: the documentation of a documented module, and the file itself; for a
    folder, the list of its files."""
    if (ROOT / path).is_dir():
        files = sorted(file.name for file in (ROOT / path).iterdir() if file.is_file())
        name = path.rpartition("/")[2]
        return "\n".join([f"# {path}", "", *(f"- [{each}]({name}/{each})" for each in files)])
    text = (ROOT / path).read_text("utf-8")
    if path.endswith(".md"):
        return text
    suffix = Path(path).suffix
    body = f'````{LANGUAGES.get(suffix, "text")} linenums="1"\n{text.rstrip()}\n````\n'
    lines = [f"# {path}", ""]
    if path in documented():
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        lines += [f"::: {module}", "", "## Source { data-search-exclude }", ""]
    return "\n".join([*lines, body])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages of the site."""
    here = page.file.src_uri
    if not has_links(source_of(here)):
        return markdown
    folder = posixpath.dirname(here)

    def relink(match: re.Match[str]) -> str:
        before, link = match.groups()
        parts = urlsplit(link)
        if parts.scheme or not parts.path:
            return match[0]
        found = file_of(parts.path, source_of(here))
        if not found:
            return match[0]  # the strict build reports it
        there = posixpath.relpath(page_of(found), folder or ".")
        if not before.startswith("]("):  # MkDocs does not read HTML
            there = there.removesuffix(".md") + ".html" if there.endswith(".md") else there
        return f"{before}{there}" + (f"#{parts.fragment}" if parts.fragment else "")

    pieces = CODE.split(markdown)
    pieces[::2] = [LINK.sub(relink, piece) for piece in pieces[::2]]
    return TIMELINE.sub(stepped, "".join(pieces))


def stepped(match: re.Match[str]) -> str:
    """The element that timeline.js fills."""
    data = json.dumps(timelines(match[1].split()), separators=(",", ":"))
    return f'<div class="timeline" data-timelines="{html.escape(data)}"></div>'
