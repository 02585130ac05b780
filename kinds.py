"""List and load kinds: of layers, routers, dispatches and optimizers. Each kind is one file of a
package, selected by the file's name. Like errors.py, this module may be imported anywhere.
"""

import importlib
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent


def kinds_in(package: str) -> list[str]:
    """List the kinds of a package by name, without importing them. Files that begin with _ are not
    kinds."""
    folder = ROOT.joinpath(*package.split("."))
    return list(_listed(folder, folder.stat().st_mtime_ns))


@lru_cache
def _listed(folder: Path, changed: int) -> list[str]:
    """Every configuration that is made asks: a search makes thousands."""
    return sorted(file.stem for file in folder.glob("[!_]*.py"))


def load_kind(package: str, kind: str, name: str, *default: Any) -> Any:
    """Import the file `kind` of `package` and return its attribute `name`, or else `default`."""
    assert kind in kinds_in(package), "the configuration has checked it"
    return getattr(importlib.import_module(f"{package}.{kind}"), name, *default)
