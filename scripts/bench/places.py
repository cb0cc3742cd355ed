"""Directories with few and with many objects, and the comparison floor: made, filled, measured.

Not for judging or printing: ops.py does.
"""

import contextlib
import mmap
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from scripts.bench.baseline.start import baseline
from scripts.bench.clients import SAMPLE, Clients, Outcome, Task, name
from scripts.bench.measure import turns
from scripts.bench.mounted import KVFS, Failed, Mounted, kvfs, scratch, started_at
from scripts.bench.report import console, note
from scripts.bench.sides import PEER, check_peer, passthrough

OPS = (
    "create",
    "rename",
    "unlink",
    "stat miss",
    "stat hit",
    "open+close",
    "open+close same",
    "readdir",
)
COLD = "stat cold"
FLOOR = "floor"
PEER_OPS = ("open+close", "open+close same")
ANSWER_LIMIT_S = 300.0
QUIET = not console.is_terminal  # no bars in files
POLL_S = 5e-4  # between two tries for the first answer


@dataclass(slots=True)
class Place:
    """A directory that is measured: on a mount, or the comparison floor's one object.

    `single`: the folder is that object.
    """

    name: str
    folder: Path
    objects: int = 0
    mounted: Mounted | None = None
    ops: tuple[str, ...] = OPS
    single: bool = False
    outcomes: dict[tuple[str, int], list[Outcome]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the command line."""

    few: int
    objects: int
    first: int
    clients: tuple[int, ...]
    operations: int
    rounds: int
    bytes_each: int
    seed: int
    nvme: Path
    ram: int | None
    peer: Path | None = None

    def options(self, label: str, objects: int, disk: Path) -> str:
        """Of a mount for that many objects: none of them has to move while calls are timed."""
        pages = -(-self.bytes_each // mmap.PAGESIZE) * mmap.PAGESIZE
        room = 2 * pages * (objects + self.operations) + ((1024 if self.peer else 256) << 20)
        half = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
        return f"ram={self.ram or min(room, half)},nvme={disk / label},nvme_size={room}"


def fill(place: Place, clients: Clients, upto: int, settings: Settings) -> None:
    """Create the objects that are missing up to that number, by all clients together."""
    begin, batch = place.objects, 1000
    tasks = [
        Task(
            "create",
            str(place.folder),
            objects=start,
            bytes_each=settings.bytes_each,
            count=min(batch, upto - start),
            client=0,
            round_=0,
            seed=settings.seed,
        )
        for start in range(begin, upto, batch)
    ]
    columns = ("making objects", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=QUIET) as progress:
        bar = progress.add_task("", total=upto - begin)
        for made in clients.populate(tasks):
            progress.advance(bar, made)
    place.objects = max(begin, upto)


def run(place: Place, op: str, clients: Clients, round_: int, settings: Settings) -> Outcome:
    """One operation by all clients on one place."""
    folder = str(place.folder)
    count = settings.operations
    if op == "open+close same" and not place.single:
        folder = os.path.join(folder, name(0))
    if op == COLD:
        count = min(count, SAMPLE)  # each object once: the second time it is not cold
    return clients.run(
        lambda client: Task(
            op,
            folder,
            objects=place.objects,
            bytes_each=settings.bytes_each,
            count=max(1, count // clients.number),
            client=client,
            round_=round_ * 100 + clients.number,
            seed=settings.seed,
        )
    )


def measure(places: list[Place], clients: Clients, settings: Settings) -> None:
    """Every operation on every place in turns; round 0 warms up."""
    columns = ("{task.description}", BarColumn())
    with Progress(*columns, console=console, transient=True, disable=QUIET) as progress:
        bar = progress.add_task("", total=(settings.rounds + 1) * len(OPS))
        for round_ in range(settings.rounds + 1):
            for op in OPS:
                progress.update(bar, description=f"{clients.number} clients: {op}", advance=1)
                for index in turns(len(places), round_):
                    place = places[index]
                    if op not in place.ops:
                        continue
                    outcome = run(place, op, clients, round_, settings)
                    if round_:
                        place.outcomes.setdefault((op, clients.number), []).append(outcome)
            for place in places:
                if place.mounted:
                    place.mounted.settle()


def measure_cold(places: list[Place], clients: Clients, settings: Settings) -> None:
    """Stat after the kernel forgot every name and inode, so that the daemon must answer."""
    for round_ in range(settings.rounds + 1):
        for index in turns(len(places), round_):
            place = places[index]
            if place.mounted is None:
                continue
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("2")
            place.mounted.settle()  # a million names to forget keep the daemon busy
            outcome = run(place, COLD, clients, round_, settings)
            if round_:
                place.outcomes.setdefault((COLD, clients.number), []).append(outcome)


def answer_time(mounted: Mounted, path: Path) -> dict[str, float]:
    """Mount again; seconds from the daemon's start, and the command's, to the first answer."""
    command = [*KVFS, "mount", str(mounted.path), "-o", mounted.options]
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    starting = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        ended = starting.poll() is not None  # asked first: a mount that is made must answer
        with contextlib.suppress(OSError):
            os.stat(path)
            break
        if ended or time.clock_gettime(time.CLOCK_BOOTTIME) - began > ANSWER_LIMIT_S:
            starting.kill()
            message = f"{path} is not there after the mount was made again"
            raise Failed(message)
        time.sleep(POLL_S)
    answered = time.clock_gettime(time.CLOCK_BOOTTIME)
    starting.wait()
    return {
        "from_daemon_start_s": answered - started_at(mounted.pid),
        "from_command_s": answered - began,
    }


def restart(place: Place) -> dict[str, float]:
    """Unmount properly, so that every object is on NVMe, and mount again."""
    mounted = place.mounted
    assert mounted is not None
    note("unmounting: what is only in RAM is written to NVMe")
    start = time.perf_counter()
    mounted.umount()
    unmounting = time.perf_counter() - start
    found = answer_time(mounted, place.folder / name(place.objects // 2))
    status = mounted.settle()
    return found | {"umount_s": unmounting, "objects_after": float(status["objects"])}


@contextlib.contextmanager
def places(settings: Settings) -> Iterator[list[Place]]:
    """Few objects, many objects, the comparison floor as root, and passthrough_hp if asked for.

    passthrough_hp shows a folder of the tmpfs that is the RAM tier of the first mount.
    """
    with contextlib.ExitStack() as stack:
        folder, disk = stack.enter_context(scratch()), stack.enter_context(scratch(settings.nvme))
        found = []
        for label, objects in (("few", settings.few), ("many", settings.objects)):
            options = settings.options(label, objects, disk)
            mounted = stack.enter_context(kvfs(folder / label, options))
            (mounted.path / "bench").mkdir()
            found.append(Place(label, mounted.path / "bench", mounted=mounted))
        if os.geteuid() == 0:
            path = stack.enter_context(baseline(folder / FLOOR, bytes(settings.bytes_each)))
            found.append(Place(FLOOR, path, objects=1, ops=("open+close same",), single=True))
        else:
            note("not root: no comparison floor")
        if settings.peer:
            first = found[0].mounted
            assert first is not None
            tier = Path(first.status()["tiers"]["ram"]["path"])
            source = stack.enter_context(scratch(tier))
            check_peer(settings.peer, source)
            mount, _ = stack.enter_context(passthrough(settings.peer, source))
            (mount / "bench").mkdir()
            found.append(Place(PEER, mount / "bench", ops=PEER_OPS))
        yield found
