"""What does it cost a daemon to be watched, by `kvfs top` and the page, and how long is a scrape?

    .venv/bin/python -m scripts.bench.watching [--namespaces 200] [--objects 10000] [--json FILE]

A mount has that many namespaces and objects, which no program uses. The benchmark takes the
daemon's processor time from /proc in a minute without watchers. In the next minute, `kvfs top` runs
in a terminal (every 2 s), and the page is open in a real browser (`scripts/browser.py`).

The process that shows the page asks the daemon even without a watcher, so the first minute is of a
mount without that process. Each minute has its own mount, of the files of an earlier one. Then
/metrics is scraped, one scrape after another, each answered anew. The figures are the time of a
scrape, and the processor time of the daemon and the page's process together. The bars are 1 % of a
processor, and 50 ms for a scrape.
"""

import json
import os
import pty
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from kvfs.control import request
from scripts.bench import report
from scripts.bench.measure import Bar, percentile
from scripts.bench.mounted import KVFS, Failed, Mounted, cpu_seconds, kvfs, scratch
from scripts.browser import chromium

PAGE, METRICS = 18197, 18196  # ports
SIZE = 4096  # bytes of an object
SCRAPES = 30
DRAWN = 10_000  # bytes, of some frames
FRESH = 0.6  # s after which a scrape asks the daemon anew
WATCHED = Bar("kvfs top and the page, % of a CPU of the daemon", 1.0, at_least=False)
SCRAPE = Bar("a scrape, median, ms", 50.0, at_least=False)


def _fill(mountpoint: Path, namespaces: int, objects: int) -> None:
    for number in range(namespaces):
        request(mountpoint, "ns_create", name=f"space-{number:03}", settings={}, uid=0, gid=0)
    for number in range(objects):
        space = mountpoint / f"space-{number % namespaces:03}"
        (space / f"object-{number:05}").write_bytes(b"x" * SIZE)


def _read(mountpoint: Path, namespaces: int, objects: int) -> None:
    """So that there are hits, and heat."""
    for number in range(0, objects, 7):
        (mountpoint / f"space-{number % namespaces:03}" / f"object-{number:05}").read_bytes()


@contextmanager
def _top(mountpoint: Path) -> Iterator[None]:
    """`kvfs top` in a terminal that is read. Raises Failed if it drew next to nothing."""
    drawn: list[int] = []
    master, slave = pty.openpty()
    command = [*KVFS, "top", str(mountpoint)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as top:
        os.close(slave)

        def read() -> None:
            try:
                while data := os.read(master, 65536):
                    drawn.append(len(data))
            except OSError:  # it has ended
                return

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            os.write(master, b"q")
            top.wait()
            reader.join()
            os.close(master)
    if sum(drawn) < DRAWN:
        raise Failed(f"kvfs top drew {sum(drawn)} bytes: not measured")


def _busy(pid: int, seconds: float) -> float:
    """Per cent of a processor that a process uses."""
    began, at = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return 100 * (cpu_seconds(pid) - at) / (time.monotonic() - began)


def _scrapes() -> list[float]:
    """Milliseconds of each."""
    found = []
    for _ in range(SCRAPES):
        time.sleep(FRESH)
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}/metrics") as answer:
            size = len(answer.read())
        found.append(1000 * (time.perf_counter() - began))
    report.console.print(f"{size} bytes a scrape")
    return found


def _children(pid: int) -> list[int]:
    """The process that shows metrics is one of them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def _measure(mounted: Mounted, seconds: float) -> dict[str, Any]:
    """With the page and metrics."""
    pid = mounted.pid
    with _top(mounted.path), chromium(1280, 900) as driver:
        driver.get(f"http://127.0.0.1:{PAGE}/")
        watched = _busy(pid, seconds)
    began = time.perf_counter()
    for _ in range(SCRAPES):
        request(mounted.path, "status")
    status_ms = 1000 * (time.perf_counter() - began) / SCRAPES
    children = [pid, *_children(pid)]
    before = sum(map(cpu_seconds, children))
    scrapes = _scrapes()
    used = sum(map(cpu_seconds, children)) - before
    return {
        "scrape_cpu_ms": 1000 * used / SCRAPES,
        "watched_percent": watched,
        "status_ms": status_ms,
        "scrape_median_ms": median(scrapes),
        "scrape_p90_ms": percentile(scrapes, 0.9),
    }


@click.command
@click.option("--namespaces", default=200, show_default=True)
@click.option("--objects", default=10_000, show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="Of each measurement.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there.")
def main(namespaces: int, objects: int, seconds: float, file: Path | None) -> None:
    """Measure, and hold against the bars."""
    found: dict[str, Any] = {"machine": report.machine()}
    with scratch() as folder:
        options = f"ram=64M,nvme={folder}/nvme,nvme_size=512M,log={folder}/log"
        with kvfs(folder / "kv", options) as mounted:
            _fill(mounted.path, namespaces, objects)
            for more in ("", f",web={PAGE},metrics={METRICS}"):
                mounted.umount()
                mounted.options = options + more
                mounted.mount()
                _read(mounted.path, namespaces, objects)
                mounted.settle()
                if more:
                    found |= _measure(mounted, seconds)
                else:
                    found["alone_percent"] = _busy(mounted.pid, seconds)
    found["cost_percent"] = found["watched_percent"] - found["alone_percent"]
    bars = [
        WATCHED.judged(found["cost_percent"]),
        SCRAPE.judged(found["scrape_median_ms"]),
    ]
    report.console.print_json(json.dumps(found | {"bars": bars}))
    if file is not None:
        file.write_text(json.dumps(found | {"bars": bars}, indent=2))


if __name__ == "__main__":
    main()
