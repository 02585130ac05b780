"""A web server that receives alarms, and a monitor that is fed by a test instead of a run."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

from runtime.log.events import append_event
from runtime.monitor.rank_0 import start_monitor


class Receiver(ThreadingHTTPServer):
    """An HTTP server on loopback that records what is posted to it.

    behaviour: the status to answer with; "hang": never answer.
    """

    daemon_threads, block_on_close = True, False

    def __init__(self, behaviour: int | str = 200) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour, self.released = behaviour, threading.Event()
        self.received: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/services/secret"
        threading.Thread(target=self.serve_forever, args=[0.02], daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()

    def kinds(self) -> list[str]:
        return [alarm["event"] for alarm in self.received]

    def wait_for(self, *kinds: str) -> None:
        """Wait until alarms of these kinds, and no others, have been received."""
        wait_until(lambda: self.kinds() == [*kinds], found=self.kinds)


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(json.loads(content))
        if self.server.behaviour == "hang":
            self.server.released.wait(300)
            return
        self.send_response(int(self.server.behaviour))
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def settings_of(folder: Path, **settings: Any) -> dict[str, Any]:
    """What a monitor is told about the run in `folder`."""
    events = folder / "events.jsonl"
    told = {
        "folder": str(folder),
        "name": "runs/x",
        "cwd": str(folder.parent),
        "past": events.stat().st_size if events.exists() else 0,
        "due": 3600.0,
        "launcher_records": True,
        **dict.fromkeys(("on_event", "prometheus", "after_commit"), ""),
        "after_commit_seconds": 3600.0,
    }
    assert settings.keys() <= told.keys()
    return {**told, **settings}


START = {"event": "start", "time": 1.0, "began": 0.0, "step": 0, "world_size": 8}
POPEN = subprocess.Popen


class FedMonitor:
    """A real monitor process, for a run folder and a pipe to which the test writes."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.run = folder / "run"
        self.run.mkdir(exist_ok=True)
        self.log = folder / "monitor.log"
        hasty = "from runtime.monitor import process; "
        hasty += "process.LOOK_SECONDS = process.SHOW_SECONDS = 0.1; "
        hasty += "process.END_EVENT_SECONDS = 1.0; process.main()"

        def start(command: list[str], **about: Any) -> subprocess.Popen[bytes]:
            return POPEN([command[0], "-c", hasty], stderr=log, **about)

        with open(self.log, "wb") as log, patch.object(subprocess, "Popen", start):
            self.process = start_monitor(settings_of(self.run, **settings))

    def tell(self, due: float = 3600.0, **line: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**line, "due": due}).encode() + b"\n")

    def event(self, event: str, **about: Any) -> None:
        self.tell(event=append_event(self.run, event, **about))

    def start(self) -> None:
        self.event(**START)

    def step(self, step: int, due: float = 3600.0, **record: Any) -> None:
        self.tell(record={"step": step, "loss": 2.5, **record}, due=due)

    def end(self, within: float = 60) -> None:
        """Close the pipe, as when rank 0 ends, and wait until the monitor has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(within)

    def __enter__(self) -> "FedMonitor":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def wait_until(
    condition: Callable[[], object], seconds: float = 60, found: Callable[[], object] = str
) -> None:
    """found: what to show if it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, found()
        time.sleep(0.02)


HELD: list[socket.socket] = []  # ports given away, until this process ends


def free_port() -> int:
    """A port at which nothing listens. It is held, so that the system gives it to no connection
    before a server listens there, which may since both allow the address's reuse."""
    HELD.append(socket.socket())
    HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    HELD[-1].bind(("127.0.0.1", 0))
    return int(HELD[-1].getsockname()[1])
