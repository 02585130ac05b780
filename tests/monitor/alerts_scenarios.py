"""A real Prometheus and a real S3 server around a real run: `make test-alerts`. (`make test` does
not collect this file.)

Prometheus and promtool are Debian's, unpacked into a temporary folder; the S3 server is moto, whose
packages are installed into one, too. Nothing else of the machine changes. Where they cannot be had,
the tests are skipped with the reason.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.monitor.alert_helpers import FedMonitor, free_port, wait_until
from tests.runs import status_of, write_config

RULES = ROOT / "runtime/monitor/rules/lattice_alerts.yaml"
RULE_TESTS = ROOT / "runtime/monitor/rules/lattice_alerts_test.yaml"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def answers(url: str) -> bool:
    try:
        return bool(get(url)) or True
    except OSError:
        return False


@contextmanager
def running(*command: str, **options: Any) -> Iterator[None]:
    """Run a program until the block ends."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    ) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `prometheus` and `promtool`."""
    if (installed := shutil.which("promtool")) and shutil.which("prometheus"):
        return Path(installed).parent
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        pytest.skip("no prometheus here, and no apt-get to get it with")
    folder = tmp_path_factory.mktemp("prometheus")
    for command in (["apt-get", "update", "-qq"], ["apt-get", "download", "prometheus"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"prometheus cannot be downloaded: {done.stderr.strip()[-200:]}")
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    return folder / "usr" / "bin"


def promtool(programs: Path, *arguments: str, text: str | None = None) -> str:
    command = [programs / "promtool", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_rule_is_right_and_tested(programs):
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    names = {rule["alert"] for rule in rules if "alert" in rule}
    assert f"{len(rules)} rules found" in promtool(programs, "check", "rules", str(RULES))
    promtool(programs, "test", "rules", str(RULE_TESTS))
    cases = yaml.safe_load(RULE_TESTS.read_text())["tests"][0]
    assert {case["alertname"] for case in cases["alert_rule_test"]} == names
    # In the rules, and shown by a run: a metric that was renamed would silence its alert.
    used = set(re.findall(r"\blattice_\w+", " ".join(rule["expr"] for rule in rules)))
    shown = set(re.findall(r"\blattice_\w+", (ROOT / "runtime/monitor/prometheus.py").read_text()))
    assert used <= shown


NEWEST = "and on (run, instance) lattice:newest"
START = "unless on (run, instance) time() - lattice_start_timestamp_seconds"


@pytest.mark.parametrize(
    ("old", "new", "alert"),
    [
        ("lattice_slow_rank_ratio > 1.1", "lattice_slow_rank_ratio > 2", "LatticeSlowRank"),
        ("updated_timestamp_seconds < 900", "updated_timestamp_seconds < 9e9", "LatticeGone"),
        # what keeps a rule quiet: a run that began again, another machine, another stage
        (f"{START} < 1800", "", "LatticeNoStep"),
        (f"{START} < 14400", "", "LatticeNoCheckpoint"),
        (f"> 300\n          {NEWEST}", "> 300", "LatticeFileNotWritten"),
        (f"== 1 {NEWEST}", "== 1", "LatticeRunFailed"),
        ('{event="data_stage"}', '{event="x"}', "LatticeSlow"),
        # a count of one machine; an old file of another run; a machine that cannot be scraped
        ('lattice:events{event="start"}', 'lattice_events_total{event="start"}', "LatticeRestarts"),
        (f"suspicions_total {NEWEST}", "suspicions_total", "LatticeSuspicion"),
        (
            "max_over_time(lattice:updated[1d])",
            "lattice_updated_timestamp_seconds",
            "LatticeSuspicion",
        ),
    ],
)
def test_a_rule_that_is_wrong_is_found(programs, tmp_path, old, new, alert):
    # Control: with one rule changed, promtool's test fails.
    text = RULES.read_text()
    assert text.count(old) == 1
    (tmp_path / RULES.name).write_text(text.replace(old, new))
    shutil.copy(RULE_TESTS, tmp_path)
    with pytest.raises(AssertionError, match=alert):
        promtool(programs, "test", "rules", str(tmp_path / RULE_TESTS.name))


def test_prometheus_scrapes_a_run_and_raises_the_alarm(programs, tmp_path):
    port, own = free_port(), free_port()
    scrape = {"job_name": "lattice", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    # this run is not restarted
    (tmp_path / RULES.name).write_text(RULES.read_text().replace("for: 5m", "for: 2s"))
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(tmp_path / RULES.name)],
        "scrape_configs": [scrape],
    }
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    command = [str(programs / "prometheus"), f"--config.file={tmp_path}/prometheus.yaml",
               f"--storage.tsdb.path={tmp_path}/data",
               f"--web.listen-address=127.0.0.1:{own}"]  # fmt: skip
    api = f"http://127.0.0.1:{own}/api/v1"

    def firing() -> set[str]:
        found = json.loads(get(f"{api}/alerts"))["data"]["alerts"]
        return {each["labels"]["alertname"] for each in found if each["state"] == "firing"}

    def value(query: str) -> list[str]:
        found = json.loads(get(f"{api}/query?query={query}"))["data"]["result"]
        return [each["value"][1] for each in found]

    with FedMonitor(tmp_path, prometheus=["127.0.0.1", port]) as monitor, running(*command):
        wait_until(lambda: answers(f"{api}/alerts"))
        monitor.event("start", step=0, world_size=1, began=time.time())
        monitor.step(7, lr=3e-4, tokens_per_second=1000.0, step_seconds=0.5)
        wait_until(lambda: value("lattice_step") == ["7"])
        shown = get(f"http://127.0.0.1:{port}/metrics")
        # it names what is not as Prometheus recommends
        assert promtool(programs, "check", "metrics", text=shown) == ""
        time.sleep(3)
        assert firing() == set()  # control: a healthy run
        monitor.event("checkpoint", step=8, failed="OSError: no space left")
        wait_until(lambda: firing() == {"LatticeSaveFailed"})
        monitor.event("end", state="failed", step=8, reason="it broke")
        wait_until(lambda: firing() == {"LatticeSaveFailed", "LatticeRunFailed"})
        monitor.end()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH with moto and s3fs."""
    if find_spec("moto") is not None and find_spec("s3fs") is not None:
        return os.environ.get("PYTHONPATH", "")
    folder = tmp_path_factory.mktemp("packages")
    wanted = ["moto[server]", f"s3fs=={version('fsspec')}", "boto3"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"moto and s3fs cannot be installed: {done.stderr.strip()[-200:]}")
    return str(folder)


def test_checkpoints_reach_an_s3_server_and_come_back(packages, data, tmp_path):
    """What happens if requests fail: tests/checkpoint/test_objects.py."""
    port = free_port()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": packages,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }

    def call(*command: str) -> str:
        program = [sys.executable, *command]
        done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    url = "s3://checkpoints/run"
    push = f"{sys.executable} -m tools.objects push {url}"
    checkpoint = {"interval": 2, "keep_last": 3, "after_commit": push}
    config = write_config(tmp_path, data, checkpoint=checkpoint)
    server = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    with running(*server, env=environment):
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/moto-api/"))
        call("-c", "import boto3; boto3.client('s3').create_bucket(Bucket='checkpoints')")
        launch = ("-m", "tools.launch", "--nproc-per-node", "2", config)
        call(*launch)
        assert status_of(tmp_path)["after_commit"] == {"done_step": 6, "pending": []}
        listed = call("-m", "tools.objects", "list", url).split()
        assert listed == [f"step-0000000{step}" for step in (2, 4, 6)]
        # The machines are lost. The way back: fetch, verify, start.
        shutil.rmtree(tmp_path / "run")
        back = tmp_path / "run" / "checkpoints"
        assert "every sha256 is right" in call("-m", "tools.objects", "fetch", url, str(back))
        assert "good" in call("-m", "tools.verify", str(tmp_path / "run"))
        said = call(*launch, "train.steps=8")
        assert f"starting from {back / 'step-00000006'} at step 6" in said
