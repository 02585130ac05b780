"""Refuse invalid settings of alarms before the run begins."""

import contextlib
import os
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from errors import UserError
from runtime.monitor.send import is_webhook
from settings.config import Config
from settings.sections import RunConfig

LOOPBACK = "127.0.0.1"
VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")


def check_alerts(config: Config) -> None:
    """Raise UserError if run.on_event, run.prometheus or checkpoint.after_commit cannot work.
    Called on rank 0, whose machine does all of it."""
    target = on_event(config.run)
    if is_webhook(target):
        _check_url(config.run.on_event, target)
    elif target:
        _check_command("run.on_event", config.run.on_event, target)
    if command := config.checkpoint.after_commit:
        _check_command("checkpoint.after_commit", command, command)
    if config.run.prometheus:
        prometheus(str(config.run.prometheus))


def on_event(config: RunConfig) -> str:
    """Return run.on_event, with the value of the variable if it names one: so that a secret is not
    in config.yaml, where others can read it."""
    setting = config.on_event
    found = VARIABLE.fullmatch(setting)
    if found is None:
        return setting
    value = os.environ.get(found[1], "").strip()
    if not value:
        why = "this variable is not set, or empty, in the environment of rank 0"
        raise UserError("run.on_event", setting, why, f"export {found[1]}, or give a URL")
    return value


def _check_url(setting: str, url: str) -> None:
    good = url.isascii() and url.isprintable() and " " not in url
    with contextlib.suppress(ValueError):
        if good and urlsplit(url).hostname and urlsplit(url).port != 0:
            return
    why = "is not the URL of a webhook"
    raise UserError("run.on_event", setting, why, "write https://HOST/PATH")


def _check_command(key: str, setting: str, command: str) -> None:
    """`setting` is shown; the command, if it is a variable's value, may be a secret."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        why = f"is not a command: {error}"
        raise UserError(key, setting, why, "close every quotation mark") from None
    if not words or shutil.which(words[0]) is None:
        named = "its value" if setting != command else repr(words[0] if words else "")
        why = f"{named} is not an executable program on rank 0's machine"
        remedy = "give its path, and make it executable; there is no shell, so write "
        raise UserError(key, setting, why, remedy + 'bash -c "…" if you need one')


def prometheus(setting: str) -> str | list[str | int]:
    """Return where run.prometheus shows the numbers: a file ….prom, absolute; or the host and port
    of PORT, HOST:PORT or [IPV6]:PORT, which is on loopback unless a host is given.

    Raises UserError if it is none of these, or cannot work.
    """
    if find_spec("prometheus_client") is None:
        why = "the package prometheus_client is not installed"
        remedy = "install it (requirements.txt has its version), or leave out run.prometheus"
        raise UserError("run.prometheus", setting, why, remedy)
    if setting.endswith(".prom"):
        folder = Path(setting).absolute().parent
        if not os.access(folder, os.W_OK | os.X_OK):
            remedy = "give a file in the folder that node_exporter reads "
            remedy += "(--collector.textfile.directory)"
            raise UserError("run.prometheus", setting, f"{folder} is not a writable folder", remedy)
        return os.path.abspath(setting)
    try:
        parts = urlsplit(f"//{setting}" if ":" in setting else f"//:{setting}")
        host, port = parts.hostname or LOOPBACK, parts.port
        host.encode("idna")  # a UnicodeError is a ValueError
        if set(setting) & set("/?#@ "):
            port = None
    except ValueError:
        port = None
    if not port:
        why = "is neither a file ….prom nor PORT or HOST:PORT"
        raise UserError("run.prometheus", setting, why, "write for example 9400")
    return [host, port]
