"""An S3 server (moto's) on loopback that drops requests:

    python -m tests.monitor.faulty_s3 PORT FIXED

Of the requests that write or delete, it answers a third with 503 before anything is done, and a
sixth with 503 after it was done (the answer is lost), until the file FIXED exists. For
tests/monitor/alerts_scenarios.py, which installs moto into a folder of its own.
"""

import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class Faulty:
    """A WSGI application in front of another."""

    def __init__(self, inner: Any, fixed: Path) -> None:
        self.inner, self.fixed, self.random = inner, fixed, random.Random(0)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        chance = self.random.random()
        faulty = environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE") and not self.fixed.exists()
        if not faulty or chance > 1 / 2:
            return self.inner(environ, start)  # type: ignore[no-any-return]
        if chance < 1 / 6:
            list(self.inner(environ, lambda *_: lambda data: None))
        start("503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"dropped"]


if __name__ == "__main__":
    application = Faulty(DomainDispatcherApplication(create_backend_app), Path(sys.argv[2]))
    make_server("127.0.0.1", int(sys.argv[1]), application, threaded=True).serve_forever()
