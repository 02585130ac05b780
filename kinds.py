"""A kind of layer or of optimizer is a file: a package's files are its kinds, and a configuration
names one. Like errors.py this file may be imported anywhere."""

import importlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent


def kinds_in(package: str) -> list[str]:
    """The kinds of a package, by name, without importing one. What begins with _ is none."""
    folder = ROOT.joinpath(*package.split("."))
    return sorted(file.stem for file in folder.glob("[!_]*.py"))


def load_kind(package: str, kind: str, name: str) -> Any:
    """What the file `kind` of `package` calls `name`."""
    assert kind in kinds_in(package), "the configuration has checked it"
    return getattr(importlib.import_module(f"{package}.{kind}"), name)
