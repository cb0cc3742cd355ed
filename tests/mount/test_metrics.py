"""Metrics of a real mount, read over its socket and by a real Prometheus."""

import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvfs.metrics.families import METRICS
from tests.conftest import Mount
from tests.harness import KVFS, PATIENCE, Mounted, alive, descendants, wait_for

OBSERVE = Path(__file__).parents[2] / "mount" / "observe"
HINT = "X-Prometheus-Scrape-Timeout-Seconds"
Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def free_port() -> int:
    """A port below those that test servers (`free_ports`) and connections take later."""
    while True:
        port = random.SystemRandom().randrange(10000, 20000)
        with socket.socket() as trying:
            try:
                trying.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@pytest.fixture
def port() -> int:
    return free_port()


def get(url: str, **headers: str) -> str:
    """Fetch a page. Raises OSError or HTTPException without an answer."""
    asked = urllib.request.Request(url, headers={HINT: str(PATIENCE)} | headers)  # noqa: S310
    with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


def scrape(port: int, **headers: str) -> Samples:
    """Samples by name and labels; empty without an answer."""
    try:
        text = get(f"http://127.0.0.1:{port}/metrics", **headers)
    except (OSError, HTTPException):
        return {}
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get(name, {}).get(tuple(sorted(labels.items())), -1.0)


def until(port: int, name: str, wanted: float, **labels: str) -> Samples:
    """Wait until a sample has a value; an answer may be half a second old."""
    samples: Samples = {}

    def there() -> bool:
        samples.clear()
        samples.update(scrape(port))
        return value(samples, name, **labels) == wanted

    wait_for(there, f"{name} {labels} is {wanted}")
    return samples


def exporter(kv: Mounted) -> int:
    """The pid of the process that serves metrics."""

    def found() -> int:
        for pid in descendants(kv.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"kvfs.metrics" in command:
                return pid
        return 0

    pid: int = wait_for(found, "metrics are shown")
    return pid


def test_opens_and_misses_are_counted(mount: Mount, port: int) -> None:
    kv = mount(f"ram=64M,nvme={{tmp}}/nvme,nvme_size=1G,metrics={port}")
    (kv.path / "a").write_bytes(b"a" * 8192)
    kv.idle()
    assert (kv.path / "a").read_bytes() == b"a" * 8192
    assert not (kv.path / "none").exists()
    samples = until(port, "kvfs_namespace_hits_total", 1, namespace=".", tier="nvme")
    assert value(samples, "kvfs_up") == 1
    assert value(samples, "kvfs_namespace_objects", namespace=".") == 1
    assert value(samples, "kvfs_namespace_bytes", namespace=".") == 8192
    assert value(samples, "kvfs_open_seconds_count", tier="nvme") == 1
    assert 0 < value(samples, "kvfs_open_seconds_sum", tier="nvme") < PATIENCE
    assert value(samples, "kvfs_seal_seconds_count", tier="nvme") == 1
    assert value(samples, "kvfs_seals_total") == 1
    absent = {"operation": "lookup", "class": "NotFoundError"}
    assert value(samples, "kvfs_errors_total", **absent) >= 2
    assert value(samples, "kvfs_defects_total") == 0
    names = {name.removesuffix("_bucket").removesuffix("_count") for name in samples}
    elsewhere = ("kvfs_bucket_", "kvfs_dirty_", "kvfs_pool_")
    local = {m.name for m in METRICS if not m.name.startswith(elsewhere)}
    perhaps = {
        "kvfs_namespace_hit_ratio_estimate"
    }  # until its capacity is known, and then more is asked
    assert local - names - perhaps == {"kvfs_hydrate_seconds"}  # there is no bucket
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"http://127.0.0.1:{port}/other")


def test_metrics_are_there_again_after_a_death_of_the_daemon(mount: Mount, port: int) -> None:
    kv = mount(f"ram=64M,metrics={port}")
    (kv.path / "a").write_bytes(b"a")
    until(port, "kvfs_seals_total", 1)
    before = exporter(kv)
    kv.kill_daemon()
    samples = until(port, "kvfs_takeovers_total", 1)
    assert value(samples, "kvfs_seals_total") == 0
    wait_for(lambda: not alive(before), "the first one has ended with its daemon")


def test_metrics_are_there_again_after_their_own_death(mount: Mount, port: int) -> None:
    kv = mount(f"ram=64M,metrics={port}")
    kv.expect_log("process that shows metrics ended with -9")
    until(port, "kvfs_up", 1)
    before = exporter(kv)
    os.kill(before, signal.SIGTERM)  # as all processes of a service get it
    until(port, "kvfs_up", 1)
    assert exporter(kv) == before
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: not alive(before), "it is dead")
    until(port, "kvfs_up", 1)


def test_a_daemon_that_does_not_answer_is_a_sample(mount: Mount, port: int) -> None:
    kv = mount(f"ram=64M,watchdog=0,metrics={port}")
    until(port, "kvfs_up", 1)
    daemon = kv.pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        wait_for(
            lambda: scrape(port, **{HINT: "0.5"}) == {"kvfs_up": {(): 0.0}}, "kvfs_up 0, alone"
        )
    finally:
        os.kill(daemon, signal.SIGCONT)
    until(port, "kvfs_up", 1)


def test_metrics_socket_answers_the_mounting_user_only(mount: Mount, tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    kv = mount("ram=64M,metrics={tmp}/m.sock")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def answer() -> bytes:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(PATIENCE)
            try:
                asking.connect(str(path))
                asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                with asking.makefile("rb") as stream:
                    return stream.read()
            except OSError:
                return b""

    wait_for(lambda: b"\nkvfs_takeovers_total 0.0\n" in answer(), "metrics")
    kv.kill_daemon()
    wait_for(lambda: b"\nkvfs_takeovers_total 1.0\n" in answer(), "metrics of the next daemon")
    kv.umount("--now")
    assert not path.exists()


def refused(tmp_path: Path, address: str) -> str:
    path = tmp_path / "kv"
    path.mkdir()
    options = f"ram=64M,log={tmp_path}/log,metrics={address}"
    done = subprocess.run(
        [*KVFS, "mount", path, "-o", options],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 2, done.stdout
    return done.stderr


def test_an_address_that_is_taken_refuses_the_mount(tmp_path: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert f"metrics=127.0.0.1:{port} cannot be used" in refused(tmp_path, str(port))


def test_metrics_socket_in_use_refuses_the_mount(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    with socket.create_server(str(path), family=socket.AF_UNIX):
        assert "another process listens there" in refused(tmp_path, str(path))


def test_a_file_where_a_socket_is_to_be_refuses_the_mount_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    assert "is no socket" in refused(tmp_path, str(path))
    assert path.read_text() == "precious"


def test_an_address_that_is_taken_meanwhile_is_no_end_of_a_takeover(
    mount: Mount, tmp_path: Path
) -> None:
    """A file of that name appears between two daemons."""
    path = tmp_path / "m.sock"
    kv = mount("ram=64M,metrics={tmp}/m.sock")
    path.unlink()
    path.write_text("precious")
    kv.expect_log("no metrics for the moment: .* is no socket")
    kv.kill_daemon()
    (kv.path / "a").write_bytes(b"a")
    shown = kv.status()["shown"]["metrics"]
    assert not shown["on"]
    assert "is no socket" in shown["why"]
    path.unlink()
    wait_for(lambda: path.exists() and stat.S_ISSOCK(path.stat().st_mode), "it listens again")
    wait_for(lambda: kv.status()["shown"] == {"metrics": {"on": True, "why": ""}}, "it says so")


def test_an_upgrade_to_an_address_that_is_taken_changes_nothing(mount: Mount, port: int) -> None:
    kv = mount(f"ram=64M,metrics={port}")
    until(port, "kvfs_up", 1)
    daemon = kv.pid
    with socket.create_server(("127.0.0.1", 0)) as taken:
        option = f"metrics={taken.getsockname()[1]}"
        done = subprocess.run(
            [*KVFS, "upgrade", kv.path, "-o", option],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
    assert done.returncode == 2, done.stdout
    assert "cannot be used" in done.stderr
    assert kv.pid == daemon
    until(port, "kvfs_takeovers_total", 0)


def changed(kv: Mounted, command: str, option: str, fails: int = 0) -> str:
    done = subprocess.run(
        [*KVFS, command, kv.path, "-o", option],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == fails, done
    return done.stderr if fails else done.stdout


@pytest.mark.parametrize("command", ["upgrade", "remount"])
def test_none_turns_metrics_and_page_off(mount: Mount, port: int, command: str) -> None:
    page = free_port()
    kv = mount(f"ram=64M,metrics={port},web={page}")
    until(port, "kvfs_up", 1)
    assert f"\nweb: 127.0.0.1:{page} -> none\n" in changed(kv, command, "web=none")
    assert kv.status()["shown"].keys() == {"metrics"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", page))
    assert f"\nmetrics: 127.0.0.1:{port} -> none\n" in changed(kv, command, "metrics=none")
    assert kv.status()["shown"] == {}


def test_page_and_metrics_at_one_address_are_refused(mount: Mount, port: int) -> None:
    kv = mount(f"ram=64M,web={port}")
    for command in ("upgrade", "remount"):
        for address in (str(port), f"0.0.0.0:{port}"):
            told = changed(kv, command, f"metrics={address}", fails=2)
            assert "are one address: give each its own" in told
            assert told.count("\n") == 1
    assert kv.status()["shown"] == {"web": {"on": True, "why": ""}}


def test_one_address_for_page_and_metrics_refuses_the_mount(tmp_path: Path, port: int) -> None:
    assert "are one address" in refused(tmp_path, f"{port},web={port}")


# A real Prometheus

Api = Callable[..., Any]


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[int], Api]]:
    """`prometheus(port)` scrapes this port each second; it gives the API's `data`."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> Api:
        own = free_port()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(OBSERVE / "kvfs.rules.yml")],
            "scrape_configs": [
                {"job_name": "kvfs", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            ],
        }
        file = tmp_path / "prometheus.json"
        file.write_text(json.dumps(config))
        command = [
            *("prometheus", f"--config.file={file}", f"--storage.tsdb.path={tmp_path}/tsdb"),
            f"--web.listen-address=127.0.0.1:{own}",
        ]
        with (tmp_path / "prometheus.log").open("wb") as log:
            begun.append(subprocess.Popen(command, stdout=log, stderr=log))

        def api(what: str, **arguments: str) -> Any:  # noqa: ANN401 - JSON
            query = "&".join(f"{name}={quote(text)}" for name, text in arguments.items())
            try:
                answer = json.loads(get(f"http://127.0.0.1:{own}/api/v1/{what}?{query}"))
            except (ConnectionRefusedError, urllib.error.URLError):
                assert begun[-1].poll() is None, (tmp_path / "prometheus.log").read_text()
                return {}
            return answer["data"]

        return api

    yield start
    for process in begun:
        process.kill()
        process.wait()


def test_prometheus_scrapes_it_and_an_alert_fires(
    mount: Mount, port: int, prometheus: Callable[[int], Api]
) -> None:
    kv = mount(f"ram=64M,nvme={{tmp}}/nvme,nvme_size=1G,metrics={port}")
    (kv.path / "a").write_bytes(b"a")
    api = prometheus(port)

    def result(expression: str) -> list[Any]:
        found: list[Any] = api("query", query=expression).get("result", [])
        return found

    def firing() -> set[str]:
        alerts = api("alerts").get("alerts", [])
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    wait_for(lambda: result('up{job="kvfs"} == 1'), "it is scraped")
    # Two samples at least, or nothing could have risen since.
    wait_for(lambda: result("count_over_time(kvfs_takeovers_total[1h]) > 1"), "two samples")
    assert result('kvfs_namespace_objects{namespace="."} == 1')
    assert firing() == set()

    kv.kill_daemon()
    wait_for(lambda: "KvfsTakeover" in firing(), "the alert fires")

    groups = api("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    text = (OBSERVE / "kvfs.rules.yml").read_text()
    assert [rule["name"] for rule in rules] == re.findall(r"- alert: (\w+)", text)

    def evaluated() -> bool:
        found = [rule for group in api("rules")["groups"] for rule in group["rules"]]
        return all(rule["health"] == "ok" for rule in found)

    wait_for(evaluated, "each rule is evaluated without an error")


def test_prometheus_evaluates_the_queries_of_the_dashboard(
    mount: Mount, port: int, prometheus: Callable[[int], Api]
) -> None:
    kv = mount(f"ram=64M,nvme={{tmp}}/nvme,nvme_size=1G,metrics={port}")
    api = prometheus(port)
    wait_for(lambda: api("query", query="kvfs_up == 1").get("result"), "it is scraped")
    (kv.path / "a").write_bytes(b"a")
    assert (kv.path / "a").read_bytes() == b"a"
    dashboard = json.loads((OBSERVE / "kvfs.grafana.json").read_text())
    drawn = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    # What this mount has not: a bucket, a pool, quotas, errors of other classes, perhaps ratios.
    without = re.compile("hydrate|hit_ratio|dirty|kvfs_(bucket|pool)|kvfs_errors_total|quota_bytes")
    wanted = [expression for expression in drawn if not without.search(expression)]

    def draws(expression: str) -> bool:
        """Whether an expression gives data; a rate needs two scrapes."""
        asked = expression.replace("$__rate_interval", "5m")
        asked = asked.replace("$instance", ".*").replace("$namespace", ".*")
        return bool(api("query", query=asked)["result"])  # it fails if that is no expression

    for expression in wanted:
        wait_for(partial(draws, expression), expression)
    for expression in {*drawn} - {*wanted}:
        draws(expression)
