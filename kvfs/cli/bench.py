"""`kvfs bench`: measure this mount on this machine, beside a plain directory, in turns.

It measures files in a tight loop here, and the calls of an engine in `engine_loop.py`.

Contract: the benchmark uses only free room, in a namespace of its own that no bucket gets, so kvfs
drops nothing for it. Both sides are cleared at the end. The next run clears the files of a run that
was killed. Every byte that was read is compared, outside of the measured time. One process with one
thread measures: its figures show whether something is wrong, and do not compare machines;
`scripts/bench` measures properly.
"""

import math
import os
import platform
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvfs import runtime
from kvfs.cli import completion, engine_loop, give, human, json_option, kvfs_mount, mounted_argument
from kvfs.cli.screen import line, pairs, progress, screen, table
from kvfs.control import request
from kvfs.errors import ConfigError, KvfsError

NAME = "kvfs-bench-"  # and the number of the process that made it
KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 16 * MIB)
TURNS = 3
MOST = 256 * MIB  # of each size, on each side
FILES_MOST = 500
LEAST = SIZES[-1]
SHARE = 2  # a half of the free room, at most


class Times(NamedTuple):
    """The seconds that each file took."""

    write: list[float]
    open: list[float]
    read: list[float]  # with its open and close


@dataclass
class Side:
    """One side of the comparison. `best` by size: the fastest turn."""

    name: str
    path: Path
    turns: dict[int, list[Times]] = field(default_factory=dict)

    def rates(self, size: int) -> dict[str, float]:
        """Return the best rates of bytes and opens a second, and the seconds of all opens."""
        turns = self.turns[size]
        opens = sorted(one for turn in turns for one in turn.open)
        files = len(turns[0].open)
        return {
            "write_bytes_per_s": files * size / min(sum(turn.write) for turn in turns),
            "read_bytes_per_s": files * size / min(sum(turn.read) for turn in turns),
            "opens_per_s": files / min(sum(turn.open) for turn in turns),
            "open_p50_s": opens[math.ceil(0.5 * len(opens)) - 1],
            "open_p99_s": opens[math.ceil(0.99 * len(opens)) - 1],
        }


@click.command
@mounted_argument
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    default=Path("/dev/shm"),  # noqa: S108 (a directory of its own is made in it)
    show_default=True,
    metavar="DIR",
    shell_complete=completion.directories,
    help="Directory to compare with.",
)
@json_option
def command(mountpoint: Path, *, against: Path, as_json: bool) -> None:
    """Measure a mount beside a plain directory.

    This takes some seconds and at most half of the free space. kvfs drops nothing for it.
    """
    kvfs_mount(mountpoint)
    status = request(mountpoint, "status")
    for left in _left(mountpoint):
        request(mountpoint, "ns_drop", name=left.name, again=True)
    tier = "ram" if "ram" in status["tiers"] else "nvme"
    if not against.is_dir():
        raise ConfigError(f"--against {against}: expected an existing directory")
    if against.stat().st_dev == mountpoint.stat().st_dev:
        raise ConfigError(f"--against {against}: expected a directory outside of the mount")
    for left in _left(against):
        try:
            shutil.rmtree(left)
        except OSError as error:
            raise ConfigError(f"--against {against}: {left}: {error.strerror}") from error
    told = status["tiers"][tier]
    free = max(0, told["capacity_bytes"] - told["used_bytes"] - told["reserved_bytes"])
    room = min(free, shutil.disk_usage(against).free) // SHARE
    if room < LEAST:
        raise ConfigError(
            f"{human(room * SHARE)} are free in the {tier} tier or in {against}: expected "
            f"{human(LEAST * SHARE)}, so that kvfs need not drop objects; make room first"
        )
    with _namespace(mountpoint, tier) as mine, _folder(against) as other:
        sides = Side("mount", mine), Side("beside", other)
        with progress() as bar:
            task = bar.add_task("measuring", total=TURNS * len(SIZES) + 1)
            for _ in range(TURNS):
                for size in SIZES:
                    for side in sides:
                        turn = _turn(side.path, size, min(room, MOST) // size)
                        side.turns.setdefault(size, []).append(turn)
                    bar.advance(task)
            engine = _engine(mine, other, room)
    rows = _rows(sides)
    found = {
        "machine": _machine(status, tier),
        "against": str(against),
        "sizes": rows,
        "writes": _writes(rows),
        "engine": engine
        | {
            "verdict": engine_loop.verdict(engine, str(against)),
            "cures": engine_loop.cures(engine, status),
        },
    }
    give(found, _show, as_json=as_json)


def _left(folder: Path) -> list[Path]:
    """Return directories that ended runs of this user have left there."""
    return [
        path
        for path in folder.glob(f"{NAME}*")
        if (pid := path.name.removeprefix(NAME)).isdecimal()
        and (int(pid) == os.getpid() or not Path(f"/proc/{pid}").exists())
        and stat.S_ISDIR((found := path.lstat()).st_mode)
        and found.st_uid == os.geteuid()
    ]


@contextmanager
def _namespace(mountpoint: Path, tier: str) -> Iterator[Path]:
    path = _new(mountpoint)
    ids = {"uid": os.geteuid(), "gid": os.getegid()}
    try:  # an interrupt may come while it is made
        request(mountpoint, "ns_create", name=path.name, settings={"media": tier}, **ids)
        yield path
    finally:
        if path.exists():
            request(mountpoint, "ns_drop", name=path.name)


@contextmanager
def _folder(against: Path) -> Iterator[Path]:
    path = _new(against)
    try:
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"--against {against}: {error.strerror}") from error
        yield path
    finally:
        if path.exists():
            shutil.rmtree(path)


def _new(folder: Path) -> Path:
    path = folder / f"{NAME}{os.getpid()}"
    if path.exists():
        raise ConfigError(f"{path} exists: remove this directory of an earlier run")
    return path


def _turn(folder: Path, size: int, files: int) -> Times:
    """Write files, then open and read them, one after the other, and unlink them."""
    files = max(1, min(files, FILES_MOST))
    data = os.urandom(size)
    buffer = bytearray(size)
    paths = [folder / f"{size}-{number}" for number in range(files)]
    times = Times([], [], [])
    try:
        for path in paths:
            began = time.perf_counter()
            with path.open("wb", buffering=0) as file:
                written = file.write(data)
            times.write.append(time.perf_counter() - began)
            if written != size:
                raise KvfsError(
                    f"{path}: {written} bytes were written, expected {size}: make room there"
                )
        for path in paths:
            began = time.perf_counter()
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            times.open.append(time.perf_counter() - began)
        for path in paths:
            began = time.perf_counter()
            with path.open("rb", buffering=0) as file:
                file.readinto(buffer)
            times.read.append(time.perf_counter() - began)
            if buffer != data:
                raise KvfsError(f"{path}: the bytes differ from those that were written: report it")
    except OSError as error:
        raise KvfsError(f"{folder}: {error.strerror or error}") from error
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    return times


def _engine(mine: Path, other: Path, room: int) -> dict[str, Any]:
    try:
        return engine_loop.measured(mine, other, room, TURNS)
    except OSError as error:
        raise KvfsError(f"{error.filename or mine}: {error.strerror or error}") from error


def _machine(status: dict[str, Any], tier: str) -> dict[str, Any]:
    cpu = [one for one in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in one]
    return {
        "processor": cpu[0].partition(": ")[2] if cpu else platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "memory_bytes": runtime.memory(),
        "kernel": platform.release(),
        "tier": tier,
        "passthrough": status["passthrough"]["on"],
        "huge_pages": status["huge_pages"]["on"],
    }


def _rows(sides: tuple[Side, Side]) -> list[dict[str, Any]]:
    return [
        {
            "bytes": size,
            "files": len(sides[0].turns[size][0].open),
            **{side.name: side.rates(size) for side in sides},
        }
        for size in SIZES
    ]


def _writes(rows: list[dict[str, Any]]) -> str:
    """Return what writes get, in one sentence."""
    parts = [
        f"{row['mount']['write_bytes_per_s'] / row['beside']['write_bytes_per_s']:.1f} in files of "
        f"{human(row['bytes'])}"
        for row in rows
    ]
    return f"Writes get {', '.join(parts)}."


def _show(found: dict[str, Any]) -> None:
    machine = found["machine"]
    on = {name: "on" if machine[name] else "off" for name in ("passthrough", "huge_pages")}
    facts = [
        (
            "machine",
            f"{machine['processors']} x {machine['processor']}, load {machine['load']:.1f}",
        ),
        ("memory", human(machine["memory_bytes"])),
        ("kernel", machine["kernel"]),
        ("mount", f"{machine['tier']} tier, passthrough {on['passthrough']}"),
        ("huge pages", on["huge_pages"]),
        ("beside", found["against"]),
    ]
    rows = [cells for row in found["sizes"] for cells in _cells(row)]
    rows += _engine_cells(found["engine"])
    screen().print(pairs(facts), table(("", "mount", "beside", "speed"), rows, left=("",)))
    screen().print(line("speed: of the mount, where the directory beside has 1; more is better"))
    screen().print(line(found["engine"]["verdict"]))
    screen().print(line(found["writes"]))
    for cure in found["engine"]["cures"]:
        screen().print(line(f"- {cure}"))


def _engine_cells(engine: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, title in (("open_and_fstat", "open and fstat"), ("read", "read")):
        for share, what in (
            ("p50", f"between work: {title}, {human(engine['bytes'])}"),
            ("p99", "  99 % of them within"),
        ):
            one, two = (engine[side][f"{name}_{share}_s"] for side in ("mount", "beside"))
            rows.append((what, f"{one * 1e6:.0f} us", f"{two * 1e6:.0f} us", f"{two / one:.2f}"))
    return rows


def _cells(row: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    size, mine, other = human(row["bytes"]), row["mount"], row["beside"]
    for what in ("write", "read"):
        one, two = (side[f"{what}_bytes_per_s"] for side in (mine, other))
        cells = f"{one / 1e9:.2f} GB/s", f"{two / 1e9:.2f} GB/s"
        yield f"{what} {row['files']} files of {size}", *cells, f"{one / two:.2f}"
    one, two = mine["opens_per_s"], other["opens_per_s"]
    yield f"open and close, {size}", f"{one:.0f}/s", f"{two:.0f}/s", f"{one / two:.2f}"
    one, two = mine["open_p99_s"], other["open_p99_s"]
    yield "  99 % of them within", f"{one * 1e6:.0f} us", f"{two * 1e6:.0f} us", f"{two / one:.2f}"
