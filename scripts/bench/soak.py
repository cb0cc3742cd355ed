"""Clients that verify all they see, while the daemon is killed under them again and again.

    .venv/bin/python -m scripts.bench.soak --clients 8 --kills 200 --objects 100000 --json FILE

The soak fills a mount with small sealed objects, and lets clients work (see
scripts/bench/workload). Meanwhile it kills the daemon, its movers or its standby with SIGKILL, and
upgrades the daemon. --seed decides the times and the order. Then the soak reads every object once
more. It exits with 1 if any operation failed, any byte was wrong, any sealed object was lost, or
anything is left open, reserved or in the log.

With --evict the tiers are small, so that objects are dropped all the time: then a miss is no
failure, but a wrong byte is. The waiting times of calls are shown, and fail nothing.
"""

import contextlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from scripts.bench.measure import percentile
from scripts.bench.mounted import KVFS, Failed, Mounted, kvfs, resident_bytes, scratch
from scripts.bench.report import Report, note
from scripts.bench.workload import sealed, shared
from scripts.bench.workload.task import SLOW, Answer, Task

VICTIMS = ("daemon", "movers", "standby")
PATIENCE = 60.0  # s; an event that has not come by then never will
IN_FLIGHT = 0.1  # s after an event; calls that begin by then meet what it has interrupted
LISTED = 20
ROOT = Path(__file__).parents[2]
Status = Callable[[], dict[str, Any]]


@dataclass(slots=True)
class Event:
    """Something that was done to the mount, and how long calls that overlap it took."""

    what: str
    at: float = 0.0  # time.monotonic()
    took: float = 0.0  # until the mount had a new daemon
    stall: float = 0.0  # the longest call of a client
    stall_open: float = 0.0  # the longest read of a file that was open before

    def overlaps(self, start: float, end: float) -> bool:
        return start <= self.at + IN_FLIGHT and end >= self.at


@dataclass(slots=True)
class Outcome:
    """All that a soak found."""

    operations: int = 0
    misses: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)  # of clients, on what they share
    events: list[Event] = field(default_factory=list)
    longest: float = 0.0  # call, of all
    longest_open: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)  # open, reserved or under way at the end
    counters: dict[str, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)  # unexpected

    def count(self, kind: str) -> int:
        return sum(finding["kind"] == kind for finding in self.findings)

    @property
    def failed(self) -> bool:
        return bool(self.findings or self.disagreements or self.left or self.log)


class Crew:
    """Client processes; each ends when its standard input does, so none outlives this one."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = tasks
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Crew":  # noqa: PYI034  (Self is of Python 3.11)
        for task in self._tasks:
            command = [sys.executable, "-m", "scripts.bench.workload", task.to_json()]
            pipe = subprocess.PIPE
            started = subprocess.Popen(
                command, text=True, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe
            )
            self._processes.append(started)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def check(self) -> None:
        """Raise Failed if one has ended, which none does by itself."""
        for task, process in zip(self._tasks, self._processes, strict=True):
            if process.poll() is not None:
                said, complained = process.communicate()
                raise Failed(f"client {task.client} has ended: {complained or said[:2000]}")

    def answers(self, patience: float) -> list[Answer]:
        """End them; or wait until they end, if they do by themselves."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
                process.stdin = None
        found = []
        for task, process in zip(self._tasks, self._processes, strict=True):
            try:
                said, complained = process.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                stack = Path(f"/proc/{process.pid}/stack")
                raise Failed(
                    f"client {task.client} ({task.role}) does not end; it waits in the kernel at\n"
                    + stack.read_text()
                ) from None
            if process.returncode:
                raise Failed(f"client {task.client} ({task.role}) failed: {complained}")
            found.append(Answer.from_json(said))
        return found


class Soak:
    """One run, on a mount that the caller has made. `status` is its state as a dict."""

    def __init__(self, folder: Path, status: Status, task: Task, seconds: float) -> None:
        self.folder = folder
        self.status = status
        self.task = task
        self.seconds = seconds
        self.rng = random.Random(task.seed)  # noqa: S311 (repeatable)
        self.outcome = Outcome()

    def run(self, events: list[str], upgrade: Callable[[], object]) -> Outcome:
        """Fill, let the clients work for `seconds` with these events, and verify everything."""
        self._prepare()
        self._crew("fill", patience=3600)
        tasks = [self._task("work", client) for client in range(self.task.clients)]
        with Crew([*tasks, *([] if self.task.evict else [self._task("watch", 0)])]) as crew:
            self._measure_memory("at_start")
            self._events(crew, events, upgrade)
            answers = crew.answers(PATIENCE)
        workers = answers[: self.task.clients]
        for answer in answers:
            self._take(answer)
        self._stalls(workers, answers[self.task.clients :])
        if not self.task.evict:
            self.outcome.disagreements = list(shared.disagreements(self.folder / "shared", workers))
        for answer in self._crew("check", patience=3600):
            self._take(answer)
        self._measure_memory("at_end")
        return self.outcome

    def _task(self, role: str, client: int) -> Task:
        return replace(self.task, role=role, client=client)

    def _crew(self, role: str, *, patience: float) -> list[Answer]:
        tasks = [self._task(role, client) for client in range(self.task.clients)]
        with Crew(tasks) as crew:
            return crew.answers(patience)

    def _prepare(self) -> None:
        (self.folder / "clients").mkdir()
        for number in range(sealed.FOLDERS):
            (self.folder / "sealed" / f"{number}").mkdir(parents=True)
        if not self.task.evict:
            shared.prepare(self.folder / "shared")

    # The kills and upgrades

    def _events(self, crew: Crew, events: list[str], upgrade: Callable[[], object]) -> None:
        start = time.monotonic()
        times = sorted(self.rng.uniform(0, self.seconds) for _ in events)
        for what, due in zip(events, times, strict=True):
            self._sleep_until(start + due, crew)
            event = Event(what, time.monotonic())
            if what == "upgrade":
                upgrade()
            else:
                self._kill(event)
            event.took = time.monotonic() - event.at
            self.outcome.events.append(event)
        self._sleep_until(start + self.seconds, crew)

    @staticmethod
    def _sleep_until(moment: float, crew: Crew) -> None:
        while (left := moment - time.monotonic()) > 0:
            time.sleep(min(0.5, left))
            crew.check()

    def _kill(self, event: Event) -> None:
        status = self.status()
        pids = victims(status, event.what)
        if not pids:
            event.what = f"no {event.what}"  # movers end when they are idle
            return
        pid = self.rng.choice(pids)
        event.at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            _kill(pid)
        if event.what == "daemon":
            deadline = event.at + PATIENCE
            while self.status()["takeovers"] == status["takeovers"]:
                if time.monotonic() > deadline:
                    raise Failed(f"no new daemon within {PATIENCE:.0f} s after {pid} was killed")

    def _measure_memory(self, when: str) -> None:
        status = self.status()
        for name in ("daemon", "keeper"):
            if f"{name}_pid" in status:
                self.outcome.memory[f"{name}_{when}"] = resident_bytes(status[f"{name}_pid"])

    # The findings

    def _take(self, answer: Answer) -> None:
        self.outcome.operations += sum(answer.calls.values())
        self.outcome.misses += answer.misses
        self.outcome.findings += answer.findings

    def _stalls(self, workers: list[Answer], watchers: list[Answer]) -> None:
        outcome = self.outcome
        for answers, name, longest in (
            (workers, "stall", "longest"),
            (watchers, "stall_open", "longest_open"),
        ):
            slow = [call for answer in answers for call in answer.slow]
            setattr(outcome, longest, max((end - start for start, end, _ in slow), default=SLOW))
            for event in outcome.events:
                met = [end - start for start, end, _ in slow if event.overlaps(start, end)]
                setattr(event, name, max(met, default=SLOW))


def _kill(pid: int) -> None:
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(pid)], check=False)


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def victims(status: dict[str, Any], kind: str) -> list[int]:
    """Processes of a mount that can be killed: its daemon, the daemon's movers, the standby."""
    daemon = int(status["daemon_pid"])
    if kind == "daemon":
        return [daemon]
    if kind == "movers":
        return [pid for pid in children(daemon) if _is_mover(pid)]
    return [pid for pid in children(int(status["keeper_pid"])) if pid != daemon]


def _is_mover(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def plan(rng: random.Random, kills: int, kinds: list[str], upgrades: int) -> list[str]:
    """The events of a run in their order; the daemon's share is the largest."""
    weights = [2 if kind == "daemon" else 1 for kind in kinds]
    found = [*rng.choices(kinds, weights, k=kills), *["upgrade"] * upgrades]
    rng.shuffle(found)
    return found


def left_over(status: dict[str, Any]) -> dict[str, int]:
    """Return the figures that must be zero when no process uses a mount, and are not."""
    reserved = {
        f"{name}: reserved": tier["reserved_bytes"] for name, tier in status["tiers"].items()
    }
    gauges = {name: status[name] for name in ("open_handles", "writers", "jobs", "trash")}
    counted = {
        f"{n}: objects": tier["objects"] - _files(tier) for n, tier in status["tiers"].items()
    }
    return {name: value for name, value in (gauges | reserved | counted).items() if value}


def _files(tier: dict[str, Any]) -> int:
    return sum(path.is_file() for path in Path(tier["path"], "objects").rglob("*"))


def surprises(log: Path, allowed: list[str]) -> list[str]:
    """Return the warnings and errors in a daemon's log that the run did not cause."""
    lines = log.read_text().splitlines() if log.exists() else []
    loud = [line for line in lines if re.match(r"\S+ \S+ (WARNING|ERROR|CRITICAL)", line)]
    return [line for line in loud if not any(re.search(pattern, line) for pattern in allowed)]


def allowed_in_log(kinds: list[str], *, evict: bool) -> list[str]:
    """Return the log lines that kills, and an NVMe tier that is too small for RAM, may cause."""
    killed = (
        ["a mover died over", "daemon .*(was killed by SIGKILL|closed its channel)"]
        if kinds
        else []
    )
    return killed + (["nothing is demoted: the NVMe tier has no room"] if evict else [])


def settled(mounted: Mounted) -> dict[str, Any]:
    """The status of a mount when the kernel has told of the last close, and nothing goes on."""
    deadline = time.monotonic() + PATIENCE
    while left_over(status := mounted.settle()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return status


def options(disk: Path, log: Path, task: Task, passthrough: str) -> str:
    """Tiers in which RAM is too small for what is written, and NVMe is, with --evict, too."""
    count = task.objects
    data = count * (sealed.LARGE // sealed.EACH + max(sealed.SIZES))
    ram = max(64, (data // 4) >> 20)
    nvme = max(128, (data // 3) >> 20) if task.evict else 2048 + ((2 * data) >> 20)
    return (
        f"ram={ram}M,nvme={disk}/kvfs,nvme_size={nvme}M,passthrough={passthrough},"
        f"log={log},promote_after=2"
    )


def show(report: Report, outcome: Outcome) -> None:
    """Print what was found, the first findings one by one."""
    daemon = [event for event in outcome.events if event.what in {"daemon", "upgrade"}]
    rows = [
        ["operations", f"{outcome.operations:,}"],
        ["failed operations", f"{outcome.count('failed'):,}"],
        ["wrong bytes or attributes", f"{outcome.count('wrong') + len(outcome.disagreements):,}"],
        ["lost sealed objects", f"{outcome.count('lost'):,}"],
        ["misses", f"{outcome.misses:,}"],
        ["longest call, ms", f"{outcome.longest * 1e3:.0f}"],
        ["longest read of an open file, ms", f"{outcome.longest_open * 1e3:.0f}"],
    ]
    for name, kind in (("stall", "stall"), ("stall of reads of an open file", "stall_open")):
        found = [getattr(event, kind) * 1e3 for event in daemon]
        if found:
            shares = [f"{percentile(found, share):.0f}" for share in (0.5, 0.99, 1.0)]
            rows.append([f"{name}, ms: p50, p99, max of {len(found)}", ", ".join(shares)])
    rows += [
        [f"memory, {name}, MiB", f"{size / 2**20:.0f}"] for name, size in outcome.memory.items()
    ]
    rows += [[name, f"{outcome.counters[name]:,}"] for name in sorted(outcome.counters)]
    report.table("soak", ["what", "found"], rows)
    for finding in sorted(outcome.findings, key=lambda one: float(one["at"]))[:LISTED]:
        note("{kind}: {behaviour} of {path} at {at:.3f}: {detail}".format(**finding))
    for line in [*outcome.disagreements, *outcome.log][:LISTED]:
        note(line)
    if outcome.left:
        note(f"left over: {outcome.left}")


@contextlib.contextmanager
def _mounted(task: Task, passthrough: str, nvme: Path) -> Iterator[tuple[Mounted, Path]]:
    with scratch() as folder, scratch(nvme) as disk:
        log = folder / "kvfs.log"
        with kvfs(folder / "kv", options(disk, log, task, passthrough)) as mounted:
            yield mounted, log


@click.command()
@click.option("--clients", default=8, show_default=True)
@click.option("--kills", default=0, show_default=True)
@click.option("--upgrade", "upgrades", default=0, show_default=True, help="How many upgrades.")
@click.option("--seed", default=None, type=int, help="Of everything that is random; printed.")
@click.option("--seconds", default=30.0, show_default=True)
@click.option("--objects", default=1000, show_default=True)
@click.option("--victims", "kinds", default="daemon,movers,standby", show_default=True)
@click.option("--passthrough", type=click.Choice(["auto", "off"]), default="auto")
@click.option("--evict", is_flag=True, help="Small tiers: objects are dropped all the time.")
@click.option("--nvme", type=click.Path(exists=True, path_type=Path), default=Path("/var/tmp"))  # noqa: S108 (a fresh folder)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *,
    clients: int,
    kills: int,
    upgrades: int,
    seed: int | None,
    seconds: float,
    objects: int,
    kinds: str,
    passthrough: str,
    evict: bool,
    nvme: Path,
    output: Path | None,
) -> None:
    """Let clients verify all they see while the daemon is killed under them."""
    chosen = kinds.split(",")
    if unknown := set(chosen) - set(VICTIMS):
        raise click.BadParameter(f"{unknown}, expected some of {', '.join(VICTIMS)}")
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    report = Report(
        "soak", seed=seed, clients=clients, kills=kills, seconds=seconds, objects=objects
    )
    task = Task("", "", 0, clients, seed, objects, evict)
    with _mounted(task, passthrough, nvme) as (mounted, log):
        if kills and "keeper_pid" not in mounted.status():
            raise Failed("kills: this kvfs has no keeper, which replaces a killed daemon")
        task = replace(task, folder=str(mounted.path))
        soak = Soak(mounted.path, mounted.status, task, seconds)
        events = plan(soak.rng, kills, chosen, upgrades)
        command = [*KVFS, "upgrade", str(mounted.path)]
        outcome = soak.run(events, lambda: subprocess.run(command, check=True))
        status = settled(mounted)
        outcome.left = left_over(status)
        outcome.counters = {
            name: status["counters"][name]
            for name in ("created", "sealed", "demoted", "promoted", "dropped", "misses")
        }
        outcome.log = surprises(log, allowed_in_log(chosen if kills else [], evict=evict))
    report.document["results"] = asdict(outcome)
    show(report, outcome)
    report.write(output)
    sys.exit(1 if outcome.failed else 0)


if __name__ == "__main__":
    main()
