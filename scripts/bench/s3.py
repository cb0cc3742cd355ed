"""How fast is a mount with a bucket, beside boto3, s3fs and rclone on the same server?

    .venv/bin/python -m scripts.bench.s3 [--size 8M ...] [--part PART ...] [--json FILE]

The server is a real S3 server on loopback, for this benchmark alone.

- `transfers`: uploads of written objects, and reads of objects that only the bucket has. 1 and 8
  readers open them and read them to their end. The client boto3 does the same with files in a tmpfs
  like kvfs's; s3fs and rclone do it with a mount. All take turns in each round, with the same
  bytes. Ratios are medians over the rounds.
- `opens`: open+close of objects in RAM, idle and while other objects go up and come down.
- `restart`: the first answer of a daemon that has 10,000 objects to upload.

It needs root, `apt-get install s3fs rclone`, and `scripts/install.sh bench` for boto3's CRT.
"""

import contextlib
import multiprocessing
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import click

from kvfs.control import request
from kvfs.s3.boto import BotoStore
from kvfs.s3.place import BucketPlace
from scripts.bench.busy import opens
from scripts.bench.measure import Bar, Series, against_best, percentile, size, size_name, turns
from scripts.bench.mounted import Failed, Mounted, command, kvfs
from scripts.bench.report import Report, note, number
from scripts.bench.s3clients import Boto3, classic, crt
from scripts.bench.s3mounts import missing, rclone, s3fs
from scripts.bench.s3usage import Usage
from scripts.s3_server import Server

MiB = 1 << 20
BUCKET = "bench"
READERS = (1, 8)
BYTES = 256 * MiB  # that each reads, or uploads, in a round, about: several objects for a reader
MOST = 256  # objects of those
HELD = "1000"  # s3_delay: nothing goes up before it is asked for
POLL_S = 0.02
PATIENCE_S = 300.0
BARS = {
    "up": Bar("upload / best of boto3 that is checked", 0.9),
    "down": Bar("cold read / best of boto3's downloads", 0.9),
    "mounts": Bar("cold read / best of s3fs and rclone", 2),
}
P99 = Bar("p99 of open+close, others going up and down / idle", 3, at_least=False)
FIRST = Bar("first answer with what is to be uploaded, s", 1, at_least=False)
FOUND = Bar("of what was to be uploaded is found again", 1)
RESIDENT, RESIDENT_SIZE = 64, 256 << 10
PAUSE_S = 0.1  # of a thread between two objects: the question is whether opens wait for transfers
COLD, COLD_SIZE = 96, 8 * MiB  # more than the RAM tier holds, so that reading them in turn is cold


class Field:
    """The objects of one size: the same bytes for everybody, other ones in each round."""

    def __init__(
        self, folder: Path, mounted: Mounted, place: BucketPlace, usage: Usage, each: int, seed: int
    ) -> None:
        self.folder = folder
        self.usage = usage
        self.mounted = mounted
        self.store = BotoStore(place)
        self.each = each
        self.count = max(8, min(MOST, BYTES // each))  # for each number of readers
        self.seed = seed
        self.names: list[str] = []

    def begin(self, round_: int) -> None:
        """New files, in memory and in the mount, which does not upload them yet."""
        self.names = [f"{self.each}-{round_}-{index}" for index in range(len(READERS) * self.count)]
        rng = random.Random(f"{self.seed} {round_} {self.each}")  # noqa: S311 (reproducible bytes)
        for name in self.names:
            (self.folder / name).write_bytes(rng.randbytes(self.each))

    def write(self) -> None:
        for name in self.names:
            (self.mounted.path / name).write_bytes((self.folder / name).read_bytes())

    def share(self, readers: int) -> list[str]:
        """Return the objects for this number of readers, which no other reads in this round."""
        return self.names[READERS.index(readers) :: len(READERS)]

    def cold(self) -> None:
        """Mount anew, so that only the bucket has the objects."""
        self.mounted.umount()
        self.mounted.mount()
        self.usage.rest("kvfs")  # its workers have started

    def end(self, prefixes: Sequence[str]) -> None:
        """All of the round is gone, also from the bucket."""
        before = tier(self.mounted)["deletes"]
        for name in self.names:
            (self.mounted.path / name).unlink()
            for path in (self.folder / name, self.folder / f"arrived-{name}"):
                path.unlink(missing_ok=True)
        for prefix in prefixes:
            self.store.delete_many([f"{prefix}/{name}" for name in self.names])
        until(lambda: tier(self.mounted)["deletes"] - before >= self.count, "they are deleted")

    def read(self, path: Path) -> None:
        """As a client does: to the end, in pieces of 1 MiB."""
        buffer = bytearray(min(self.each, MiB))
        fd = os.open(path, os.O_RDONLY)
        try:
            got = 0
            while more := os.readv(fd, [buffer]):
                got += more
        finally:
            os.close(fd)
        if got != self.each:
            raise Failed(f"{path}: {got} bytes, expected {self.each}")


def tier(mounted: Mounted) -> dict[str, Any]:
    """Return the daemon's status of its bucket."""
    found: dict[str, Any] = request(mounted.path, "status")["tiers"]["s3"]
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll it. Raises Failed."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(POLL_S)


def flush(mounted: Mounted) -> None:
    """As `kvfs flush --wait`, without the start of Python."""
    until(lambda: not request(mounted.path, "flush")["objects_left"], "all is uploaded")


def at_once(count: int, do: Callable[[str], object], names: Sequence[str]) -> None:
    """For each name, by so many threads."""
    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(do, name) for name in names]:
            done.result()


Found = dict[tuple[str, str], list[dict[str, Any]]]  # (what, who): a figure for each round


def transfers(field: Field, clients: list[Boto3], mounts: dict[str, Path], rounds: int) -> Found:
    """Round 0 warms up."""
    found: Found = {}
    prefixes = [client.name.replace(" ", "-") for client in clients]

    def turn(what: str, round_: int, moved: int, ways: dict[str, Callable[[], None]]) -> None:
        names = list(ways)
        for index in turns(len(names), round_):
            with field.usage.of(moved) as figures:
                ways[names[index]]()
            if round_:
                found.setdefault((what, names[index]), []).append(figures)

    def upload(client: Boto3, prefix: str) -> Callable[[], None]:
        def one(name: str) -> None:
            client.upload(str(field.folder / name), f"{prefix}/{name}")

        return lambda: at_once(max(READERS), one, field.names)

    def download(client: Boto3, readers: int) -> Callable[[], None]:
        def one(name: str) -> None:
            client.download(f"{prefixes[0]}/{name}", str(field.folder / f"arrived-{name}"))

        return lambda: at_once(readers, one, field.share(readers))

    def read(folder: Path, readers: int) -> Callable[[], None]:
        return lambda: at_once(
            readers, lambda name: field.read(folder / name), field.share(readers)
        )

    for round_ in range(rounds + 1):
        note(f"{len(field.names) or ''} {size_name(field.each)}, round {round_}")
        field.begin(round_)
        field.write()
        ways: dict[str, Callable[[], None]] = {"kvfs": lambda: flush(field.mounted)}
        for client, prefix in zip(clients, prefixes, strict=True):
            ways[client.name] = upload(client, prefix)
        turn("up", round_, len(field.names) * field.each, ways)
        field.cold()
        for readers in READERS:
            ways = {"kvfs": read(field.mounted.path, readers)}
            ways |= {client.name: download(client, readers) for client in clients}
            ways |= {name: read(folder / prefixes[0], readers) for name, folder in mounts.items()}
            turn(f"down {readers}", round_, field.count * field.each, ways)
        field.end(prefixes)
    return found


def judged(
    found: Found, field: Field, clients: list[Boto3]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows, and bars, of one size of objects."""
    rows, bars = [], []
    checked = {client.name for client in clients if client.checked}
    direct = {client.name for client in clients}
    for what in dict.fromkeys(what for what, _ in found):
        figures = {who: rounds for (one, who), rounds in found.items() if one == what}
        rates = {
            who: Series(tuple(one["bytes_s"] for one in rounds)) for who, rounds in figures.items()
        }
        last = {who: rounds[-1]["cpu_s_GB"] for who, rounds in figures.items()}
        name = size_name(field.each)
        rows.append({"what": what, "objects": name, "cpu_s_GB": last})
        rows[-1]["MB_s"] = {who: series.median / 1e6 for who, series in rates.items()}
        rows[-1]["rounds_MB_s"] = {who: [r / 1e6 for r in s.rates] for who, s in rates.items()}
        held = [("up" if what == "up" else "down", checked if what == "up" else direct)]
        held += [] if what == "up" else [("mounts", rates.keys() - direct - {"kvfs"})]
        for bar, who in held:
            if who:
                best, ratios = against_best(rates["kvfs"], {one: rates[one] for one in sorted(who)})
                readers = "" if what == "up" else f", {what.removeprefix('down ')} readers"
                at = f"{name}{readers}: {best}"
                bars.append(BARS[bar].judged(ratios["median"], at, ratios["best"]))
    return rows, bars


def opens_meanwhile(
    folder: Path, memory: Path, place: BucketPlace, seconds: float, rounds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Time open+close of objects in RAM, idle, and while 8 threads read cold objects and 8 write.

    A plain file on tmpfs is timed in the same moments. Every open waits for a CPU that other
    processes have, which is not the fault of a file system.
    """
    plain = memory / "plain"
    plain.write_bytes(b"")
    options = f"ram={COLD * COLD_SIZE // 3},s3_delay=0,s3_dirty=256M,{bucket_options(place)}"
    rows, bars = [], []
    with kvfs(folder / "opens", options) as mounted:
        data = os.urandom(COLD_SIZE)
        for index in range(COLD):
            (mounted.path / f"cold{index}").write_bytes(data)
        command("ns", "create", f"{mounted.path}/resident", "pin=on")
        paths = [f"{mounted.path}/resident/{index}" for index in range(RESIDENT)]
        for path in paths:
            Path(path).write_bytes(data[:RESIDENT_SIZE])
        flush(mounted)
        mounted.settle()
        for round_ in range(rounds):
            idle, plain_idle = opens(paths, seconds), opens([str(plain)], seconds)
            before = tier(mounted)
            with moving(mounted.path, data):
                until(lambda: tier(mounted)["downloads"] >= before["downloads"] + 8, "they move")  # noqa: B023 (called at once)
                before = tier(mounted)
                busy, plain_busy = opens(paths, seconds), opens([str(plain)], seconds)
                after = tier(mounted)
            flush(mounted)
            mounted.settle()
            row: dict[str, Any] = {"round": round_}
            for name, spent in (
                *(("idle", idle), ("busy", busy)),
                *(("plain_idle", plain_idle), ("plain_busy", plain_busy)),
            ):
                row[f"{name}_p50_us"] = percentile(spent, 0.5) * 1e6
                row[f"{name}_p99_us"] = percentile(spent, 0.99) * 1e6
            row |= {name: after[name] - before[name] for name in ("uploads", "downloads")}
            rows.append(row)
    idle_p99 = Series(tuple(row["idle_p99_us"] for row in rows))
    ratios = Series(tuple(row["busy_p99_us"] for row in rows)).against(idle_p99)
    bars.append(P99.judged(ratios["median"], f"{rounds} rounds", ratios["best"]))
    return rows, bars


@contextlib.contextmanager
def moving(folder: Path, data: bytes) -> Iterator[None]:
    """Two processes: 8 threads read what the bucket has, in turn, and 8 write what goes up."""
    stop = multiprocessing.Event()

    def read(first: int) -> None:
        index = first
        while not stop.is_set():
            (folder / f"cold{index % COLD}").read_bytes()
            index += max(READERS)
            time.sleep(PAUSE_S)

    def write(first: int) -> None:
        while not stop.is_set():
            (folder / f"new{first}").write_bytes(data)
            time.sleep(PAUSE_S)

    def move(do: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(max(READERS)) as threads:
            list(threads.map(do, range(max(READERS))))

    both = [multiprocessing.Process(target=move, args=(do,)) for do in (read, write)]
    for one in both:
        one.start()
    try:
        yield
    finally:
        stop.set()
        for one in both:
            one.join()


def restart(
    folder: Path, disk: Path, place: BucketPlace, objects: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """So many objects are to be uploaded: a daemon that is killed, and another mount."""
    options = f"ram=512M,nvme={disk}/restart-nvme,nvme_size=2G,s3_dirty=1G,s3_delay={HELD}"
    row: dict[str, Any] = {"objects": objects}
    with kvfs(folder / "restart", f"{options},{bucket_options(place)}") as mounted:
        for index in range(objects):
            (mounted.path / f"f{index}").write_bytes(b"%7d" % index * 700)

        def first(what: str, begun: float) -> None:
            (mounted.path / "f0").stat()
            row[f"{what}_first_s"] = time.perf_counter() - begun
            until(lambda: bool(tier(mounted)["loaded"]), "what is to be uploaded is found")
            row[f"{what}_found_s"] = time.perf_counter() - begun
            row[f"{what}_found"] = tier(mounted)["dirty_objects"]

        takeovers = request(mounted.path, "status")["takeovers"]
        begun = time.perf_counter()
        os.kill(request(mounted.path, "status")["daemon_pid"], 9)
        until(lambda: request(mounted.path, "status")["takeovers"] > takeovers, "another serves")
        first("killed", begun)
        mounted.umount()
        begun = time.perf_counter()
        mounted.mount()
        row["mount_s"] = time.perf_counter() - begun
        first("mounted", time.perf_counter())
        begun = time.perf_counter()
        flush(mounted)
        row["uploads_s"] = objects / (time.perf_counter() - begun)
    bars = []
    for what in ("killed", "mounted"):
        bars.append(FIRST.judged(row[f"{what}_first_s"], what))
        bars.append(FOUND.judged(row[f"{what}_found"] / objects, what))
    return row, bars


def bucket_options(place: BucketPlace) -> str:
    """For `kvfs mount`."""
    return f"s3=s3://{place.bucket}/kvfs,s3_endpoint={place.endpoint},s3_region={place.region}"


@click.command()
@click.option("--part", "parts", multiple=True, default=["transfers", "opens", "restart"])
@click.option("--size", "sizes", multiple=True, default=["1M", "8M", "32M", "64M"])
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="Of each turn of opens.")
@click.option(
    "--huge",
    type=click.Choice(["within_size", "always", "advise", "never"]),
    default="within_size",
    show_default=True,
    help="Pages of kvfs's tmpfs and of boto3's.",
)
@click.option("--objects", default=10_000, show_default=True, help="Of the restart.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *, parts: tuple[str, ...], sizes: tuple[str, ...], rounds: int, seconds: float, objects: int,
    huge: str, seed: int, output: Path | None,
) -> None:  # fmt: skip
    """Compare a mount that has a bucket with boto3, s3fs and rclone."""
    report = Report("s3", rounds=rounds, seed=seed, huge=huge)
    results: dict[str, Any] = {}
    bars: list[dict[str, Any]] = []
    found: tuple[Any, list[dict[str, Any]]]
    with (
        tmpfs(huge) as memory,
        tempfile.TemporaryDirectory(dir="/var/tmp") as disk,
    ):
        server = Server(Path(disk) / "server")
        try:
            server.start()
            os.environ.update(server.credentials)
            client = boto3.client("s3", endpoint_url=server.endpoint)
            for part in parts:
                place = server.place(f"{BUCKET}-{part}")
                client.create_bucket(Bucket=place.bucket)
                if part == "transfers":
                    found = compare(
                        memory, Path(disk), server, place, sizes, rounds, seed, huge=huge
                    )
                elif part == "opens":
                    found = opens_meanwhile(Path(disk), memory, place, seconds, rounds)
                elif part == "restart":
                    found = restart(Path(disk), Path(disk), place, objects)
                else:
                    raise Failed(f"--part {part}: it is transfers, opens or restart")
                results[part] = found[0]
                bars += found[1]
        finally:
            server.wipe()
    report.document["results"] = results
    show(report, results)
    report.bars(bars)
    report.document["load_at_end"] = os.getloadavg()[0]
    note(f"load at the end: {os.getloadavg()[0]:.1f}")
    report.write(output)


@contextlib.contextmanager
def tmpfs(huge: str) -> Iterator[Path]:
    """Memory for files; what its pages cost depends on their size, most where a host lends them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"huge={huge},mode=700", "kvfs-bench", path], check=True
        )
        try:
            yield Path(path)
        finally:
            subprocess.run(["umount", path], check=True)


def compare(
    memory: Path, disk: Path, server: Server, place: BucketPlace, sizes: Sequence[str], rounds: int,
    seed: int, *, huge: str,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:  # fmt: skip
    """Rows and bars of all sizes."""
    clients = [client for client in (classic(place), crt(place)) if client is not None]
    if len(clients) == 1:
        note("awscrt is not installed: no column for the CRT (scripts/install.sh bench)")
    for name in missing():
        note(f"{name} is not installed: it has no column (apt-get install {name})")
    rows, bars = [], []
    options = f"ram=2G,nvme={disk}/nvme,nvme_size=4G,s3_dirty=2G,s3_delay={HELD},huge={huge}"
    with contextlib.ExitStack() as stack:
        others: dict[str, Path] = {}
        if "s3fs" not in missing():
            others["s3fs"] = stack.enter_context(s3fs(place, disk / "s3fs", memory))
        if "rclone" not in missing():
            others["rclone"] = stack.enter_context(rclone(place, disk / "rclone"))
        mounted = stack.enter_context(
            kvfs(disk / "transfers", f"{options},{bucket_options(place)}")
        )
        # Nothing stays on a disk, and nothing comes before it is opened: reads are cold.
        command("ns", "set", str(mounted.path), "media=ram+s3", "prefetch=off")
        pids = server.pids()
        usage = Usage(
            {
                "server": lambda: pids,
                "kvfs": lambda: [request(mounted.path, "status")["daemon_pid"]],
                "client": lambda: [os.getpid()],
            }
        )
        for text in sizes:
            field = Field(memory, mounted, place, usage, size(text), seed)
            found = transfers(field, clients, others, rounds)
            more_rows, more_bars = judged(found, field, clients)
            rows += more_rows
            bars += more_bars
    return rows, bars


def show(report: Report, results: dict[str, Any]) -> None:
    """Tables of the parts that ran."""
    rows = results.get("transfers", [])
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row["MB_s"]))
        report.table(
            "MB/s, median round",
            ["objects", "what", *names, "kvfs: CPU s/GB of server, kvfs, client"],
            [
                [
                    row["objects"],
                    row["what"],
                    *(number(row["MB_s"].get(name)) for name in names),
                    ", ".join(number(one) for one in row["cpu_s_GB"]["kvfs"].values()),
                ]
                for row in rows
            ],
            note="down 8: with 8 readers",
        )
    if rows := results.get("opens", []):
        report.table(
            "open+close", list(rows[0]), [[number(one) for one in row.values()] for row in rows]
        )
    if row := results.get("restart"):
        report.table("Restart", ["", ""], [[name, number(one)] for name, one in row.items()])


if __name__ == "__main__":
    main()
