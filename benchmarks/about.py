"""The machine and the versions with which something was measured, for every file of results."""

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def about(*packages: str) -> dict[str, Any]:
    """The date, the machine, and the versions of Python, torch and `packages`."""
    return {
        "date": str(datetime.date.today()),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{package: version_of(package) for package in ("torch", *packages)},
    }


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
