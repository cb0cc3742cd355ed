"""A node announces many objects, and announces them again after the index has lost its data.

    .venv/bin/python -m scripts.bench.pool_rebuild --objects 1000000 --json rebuild.json

One mount with a pool and a real redis-server. The objects are small files in RAM. The first time is
from the first write until the index has all objects. Then FLUSHALL empties the index, and the
second time is until it has all objects again. Beside it, resident objects are opened, and the last
rows have the p99 of these opens before and meanwhile. Needs redis-server and nginx.
"""

import contextlib
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import redis

from kvfs.control import request
from scripts.bench.measure import percentile
from scripts.bench.mounted import Mounted
from scripts.bench.pool import free_port, redis_server
from scripts.bench.report import Report, number

FILES = 1000  # of a directory
OPENS_S = 5.0  # s of opens before the loss
PAUSE_S = 0.001  # s between two opens
BETWEEN = 200  # opens between two looks at the index


def announced(mounted: Mounted) -> int:
    """Objects of the node that the index has, as the node knows."""
    found: int = request(mounted.path, "status")["pool"]["objects"]
    return found


def write(folder: Path, objects: int) -> None:
    """Write small files, each with bytes of its own."""
    for at in range(objects):
        if at % FILES == 0:
            (folder / str(at // FILES)).mkdir()
        fd = os.open(f"{folder}/{at // FILES}/{at}", os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(fd, b"%d" % at)
        os.close(fd)


def opens(path: Path, count: int) -> list[float]:
    """Seconds of opens of a resident object, one each millisecond."""
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        os.close(os.open(path, os.O_RDONLY))
        spent.append(time.perf_counter() - began)
        time.sleep(PAUSE_S)
    return spent


@click.command(help=__doc__)
@click.option("--objects", default=1_000_000, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(objects: int, output: Path | None) -> None:
    """Measure all."""
    report = Report("pool_rebuild", objects=objects)
    with TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        port = free_port()
        stack.enter_context(redis_server(folder, port))
        path = folder / "kv"
        path.mkdir()
        options = (
            f"ram={objects * 5 // 4 * 4096 + (64 << 20)},pool=redis://127.0.0.1:{port}/bench,"
            f"pool_address=127.0.0.1:{free_port()},log={folder}/kv.log"
        )
        mounted = Mounted(path, options)
        mounted.mount()
        stack.callback(mounted.umount, now=True)
        index = redis.Redis(port=port)

        began = time.perf_counter()
        write(path, objects)
        written = time.perf_counter() - began
        while announced(mounted) < objects:
            time.sleep(0.5)
        first = time.perf_counter() - began

        resident = path / "0" / "0"
        before = opens(resident, round(OPENS_S / PAUSE_S / 2))
        index.flushall()
        began, meanwhile = time.perf_counter(), opens(resident, BETWEEN)
        while index.dbsize() < objects:
            meanwhile += opens(resident, BETWEEN)
        again = time.perf_counter() - began
    p50 = [percentile(one, 0.5) * 1e6 for one in (before, meanwhile)]
    p99 = [percentile(one, 0.99) * 1e6 for one in (before, meanwhile)]
    rows = [
        ["written, s", number(written)],
        ["written and announced, s", number(first)],
        ["announced again after a loss, s", number(again)],
        ["objects/s", number(objects / again)],
        ["opens before, p50 and p99, us", f"{number(p50[0])} {number(p99[0])}"],
        ["opens meanwhile, p50 and p99, us", f"{number(p50[1])} {number(p99[1])}"],
        ["times the p99", number(p99[1] / p99[0])],
    ]
    report.document["rows"] = rows
    report.table(f"{objects:,} objects of one node", ["what", "found"], rows)
    report.write(output)


if __name__ == "__main__":
    main()
