"""Clients on four nodes of a pool verify all they see, while nodes and the index are broken.

    .venv/bin/python -m scripts.bench.pool_soak --seconds 600 --events 60 --json FILE

Each node has small tiers, so objects are dropped all the time: a miss is no failure, a wrong byte
is. Meanwhile the soak kills daemons, servers of bytes and whole nodes, stops nodes and the index
for --stop seconds, and lets the index lose its data. --seed decides what happens when. Calls of a
stopped node wait, and its clients end with a killed one. At the end all is well again for some
seconds; then each node must show the last version of a file, or none. After a loss of the index an
earlier version may have the name again: these are told, and no failure. Exits with 1 if an
operation failed, a byte was wrong, or a call was longer than `pool_wait` and PATIENT. With a bucket
a call may take FIRST_WAIT more: the first lookups of a daemon wait for its workers.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import click
import redis

from kvfs import runtime
from kvfs.core.bucket.listing.bucket_lookup import FIRST_WAIT
from kvfs.pool.nginx import Nginx
from scripts.bench.measure import percentile
from scripts.bench.mounted import Mounted, is_mounted, scratch
from scripts.bench.pool import free_port
from scripts.bench.report import Report, note
from scripts.bench.s3 import bucket_options
from scripts.bench.soak import LISTED, Crew, children
from scripts.bench.workload import pooled
from scripts.bench.workload.task import Answer, Calls, Task, WrongError
from scripts.s3_server import Server

KINDS = ("daemon", "nginx", "node", "stop", "remount", "index stop", "index lost", "index killed")
POOL_WAIT = 2.0  # s, the default
PATIENT = 2.0  # s that a busy machine may add
SETTLED = 12.0  # s: a lease, and the second lookup of a name
LIFE = 100  # a client that starts anew has a greater number by this
ANSWERS = 120.0  # s


@dataclass(slots=True)
class Broken:
    """A fault of one node, or of the index (node -1), and how long it lasted."""

    what: str
    node: int
    begin: float  # time.monotonic()
    end: float = 0.0
    longest: float = 0.0  # of calls on other nodes meanwhile


@dataclass(slots=True)
class Outcome:
    """All that a soak found."""

    operations: int = 0
    misses: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    events: list[Broken] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)  # earlier versions at the end
    longest: float = 0.0  # s, of calls on nodes that were not stopped
    slow: list[str] = field(default_factory=list)  # calls that took too long
    counters: dict[str, int] = field(default_factory=dict)


class Index:
    """A redis-server that can be stopped, killed and emptied."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder = folder
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        process = subprocess.Popen(
            ["redis-server", *words, "--save", ""], stdout=subprocess.DEVNULL
        )
        client = redis.Redis(port=self.port)
        while True:
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                return process
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def lose(self) -> None:
        redis.Redis(port=self.port).flushall()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self._process = self._start()


class Node:
    """One node: its mount, and the clients that use it."""

    def __init__(self, folder: Path, number: int, index: Index, more: str, nvme: str) -> None:
        """more: options of all nodes. nvme: the size of this node's."""
        self.number = number
        path = folder / f"node{number}"
        path.mkdir()
        self.mounted = Mounted(
            path,
            f"ram=48M,nvme={folder}/nvme{number},nvme_size={nvme},entry_timeout=0,"
            f"pool=redis://127.0.0.1:{index.port}/soak,pool_address=127.0.0.1:{free_port()},"
            f"pool_required=off,log={folder}/node{number}.log{more}",
        )
        self.mounted.mount()
        self._keeper = int(self.mounted.status()["keeper_pid"])

    @property
    def nginx(self) -> Nginx:
        return Nginx(runtime.runtime_dir(self.mounted.path) / "nginx")

    def pids(self) -> list[int]:
        """All its processes: the keeper first, then daemon, movers, and nginx."""
        found, waiting = [], [self._keeper]
        while waiting:
            pid = waiting.pop(0)
            found.append(pid)
            with contextlib.suppress(FileNotFoundError):
                waiting += children(pid)
        return [*found, *(pid for pid in self.nginx.pids if pid not in found)]

    def die(self) -> None:
        """End as a machine without power does; NVMe stays."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while is_mounted(self.mounted.path):
            subprocess.run(["umount", "-l", str(self.mounted.path)], check=False)

    def begin(self) -> None:
        """Mount again."""
        self.mounted.mount()
        self._keeper = int(self.mounted.status()["keeper_pid"])

    def end(self) -> None:
        if is_mounted(self.mounted.path):
            self.mounted.umount(now=True)


class PoolSoak:
    """One run on nodes that the caller has made."""

    def __init__(
        self, nodes: list[Node], index: Index, task: Task, stop_s: float, wait_s: float
    ) -> None:
        """stop_s, wait_s: seconds of each stop, and that a call may wait."""
        self.nodes = nodes
        self.index = index
        self.task = task
        self.stop_s = stop_s
        self.wait_s = wait_s
        self.rng = random.Random(task.seed)  # noqa: S311 (repeatable)
        self.outcome = Outcome()
        self._life = 0
        self._crews: dict[int, tuple[Crew, list[Task]]] = {}
        self._answers: list[tuple[Task, Answer]] = []

    def run(self, seconds: float, events: list[str]) -> Outcome:
        """Let the clients work for `seconds` with these events, and verify everything."""
        with contextlib.ExitStack() as stack:
            for node in self.nodes:
                self._begin_clients(node, stack)
            start = time.monotonic()
            times = sorted(self.rng.uniform(0, seconds) for _ in events)
            for what, due in zip(events, times, strict=True):
                self._wait_until(start + due)
                self._break(what, stack)
            self._wait_until(start + seconds)
            for node in self.nodes:
                self._end_clients(node)
        self._stalls()
        time.sleep(SETTLED)
        self._converge()
        return self.outcome

    def _begin_clients(self, node: Node, stack: contextlib.ExitStack) -> None:
        tasks = [
            replace(self.task, folder=str(node.mounted.path), client=client)
            for client in range(node.number, self.task.clients, self.task.nodes)
        ]
        tasks = [replace(one, client=one.client + self._life * LIFE) for one in tasks]
        self._crews[node.number] = stack.enter_context(Crew(tasks)), tasks

    def _end_clients(self, node: Node) -> None:
        crew, tasks = self._crews.pop(node.number)
        for task, answer in zip(tasks, crew.answers(ANSWERS), strict=True):
            self._answers.append((task, answer))
            self.outcome.operations += sum(answer.calls.values())
            self.outcome.misses += answer.misses
            self.outcome.findings += answer.findings

    def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            time.sleep(min(0.5, left))
            for crew, _ in self._crews.values():
                crew.check()

    def _break(self, what: str, stack: contextlib.ExitStack) -> None:
        """Break something, and mend it after a while."""
        node = self.rng.choice(self.nodes)
        event = Broken(what, -1 if what.startswith("index") else node.number, time.monotonic())
        self.outcome.events.append(event)
        if what in {"daemon", "nginx"}:
            status = node.mounted.status()
            pids = [status["daemon_pid"]] if what == "daemon" else node.nginx.pids
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
        elif what == "node":
            self._kill_clients(node)
            node.die()
            self._wait_until(time.monotonic() + self.rng.uniform(0, self.stop_s))
            node.begin()
            self._life += 1
            self._begin_clients(node, stack)
        elif what == "remount":
            self._end_clients(node)
            node.mounted.umount(now=True)
            node.begin()
            self._life += 1
            self._begin_clients(node, stack)
        elif what == "stop":
            pids = node.pids()
            _signal(pids, signal.SIGSTOP)
            try:
                self._wait_until(time.monotonic() + self.stop_s)
            finally:
                _signal(pids, signal.SIGCONT)
        elif what == "index stop":
            self.index.send(signal.SIGSTOP)
            try:
                self._wait_until(time.monotonic() + self.stop_s)
            finally:
                self.index.send(signal.SIGCONT)
        elif what == "index lost":
            self.index.lose()
        else:
            self.index.kill()
            self._wait_until(time.monotonic() + self.rng.uniform(0, self.stop_s))
            self.index.restart()
        event.end = time.monotonic()

    def _kill_clients(self, node: Node) -> None:
        crew, _ = self._crews.pop(node.number)
        crew.__exit__()

    def _stalls(self) -> None:
        """Find the longest calls, without those of a node that was stopped or had no daemon."""
        limit = self.wait_s + PATIENT
        for task, answer in self._answers:
            node = task.client % self.task.nodes
            for begin, end, name in answer.slow:
                met = [one for one in self.outcome.events if begin <= one.end and end >= one.begin]
                if any(one.node == node for one in met):
                    continue
                for one in met:
                    one.longest = max(one.longest, end - begin)
                self.outcome.longest = max(self.outcome.longest, end - begin)
                if end - begin > limit:
                    told = ", ".join(f"{one.what} of {one.node}" for one in met) or "nothing"
                    self.outcome.slow.append(
                        f"{name} at node {node} took {end - begin:.2f} s, during: {told}"
                    )

    def _converge(self) -> None:
        """See each file of each client at each node: its last version, or none."""
        calls, lost = (
            Calls(),
            any(one.what in {"index lost", "index killed"} for one in self.outcome.events),
        )
        for _ in range(2):  # the first lookup lets old copies go
            for task, answer in self._answers:
                for name in answer.last:
                    for node in self.nodes:
                        path = f"{pooled.folder_of(task, task.client)}/{name}.bin"
                        with contextlib.suppress(OSError):
                            os.stat(path.replace(task.folder, str(node.mounted.path)))
            time.sleep(2)
        for task, answer in self._answers:
            for name, last in answer.last.items():
                for node in self.nodes:
                    there = replace(task, folder=str(node.mounted.path))
                    path = f"{pooled.folder_of(there, task.client)}/{name}.bin"
                    try:
                        found = calls.read_all(path)
                        version = pooled.verify(there, path, found, task.client, int(name))
                    except FileNotFoundError:
                        continue
                    except WrongError as error:
                        self._found(error.kind, path, error.detail)
                        continue
                    if version == last:
                        continue
                    told = f"{path}: version {version}, the last is {last}"
                    self.outcome.stale.append(told)
                    if not lost:
                        self._found("wrong", path, told)

    def _found(self, kind: str, path: str, detail: str) -> None:
        self.outcome.findings.append(
            {"kind": kind, "behaviour": "converge", "path": path, "detail": detail, "at": 0.0}
        )


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def pool(
    folder: Path, count: int, copies: str, *, bucket: bool
) -> Iterator[tuple[list[Node], Index]]:
    """An index and so many nodes, gone afterwards.

    With copies=keep the last node has room for the others. bucket: a real Ceph is below them.
    """
    with contextlib.ExitStack() as stack:
        index = Index(folder)
        stack.callback(index.kill)
        more = f",pool_copies={copies}"
        if bucket:
            more += f",{stack.enter_context(below(folder))}"
        nodes = []
        for number in range(count):
            roomy = copies == "keep" and number == count - 1
            nodes.append(Node(folder, number, index, more, "2G" if roomy else "128M"))
            stack.callback(nodes[-1].end)
        yield nodes, index


@contextlib.contextmanager
def below(folder: Path) -> Iterator[str]:
    """A bucket of a real Ceph; gives the options of a mount."""
    server = Server(folder / "ceph")
    try:
        server.start()
        os.environ.update(server.credentials)
        place = server.place("soak")
        boto3.client("s3", endpoint_url=server.endpoint).create_bucket(Bucket=place.bucket)
        yield f"{bucket_options(place)},s3_delay=0.5,s3_recheck=1"
    finally:
        server.wipe()


def show(report: Report, outcome: Outcome) -> None:
    """Print what was found, the first findings one by one."""
    kinds = [one["kind"] for one in outcome.findings]
    rows = [
        ["operations", f"{outcome.operations:,}"],
        ["failed operations", f"{kinds.count('failed') + kinds.count('lost'):,}"],
        ["wrong bytes, attributes or versions", f"{kinds.count('wrong'):,}"],
        ["misses", f"{outcome.misses:,}"],
        ["earlier versions at the end", f"{len(outcome.stale):,}"],
        ["longest call, ms", f"{outcome.longest * 1e3:.0f}"],
        ["calls that took too long", f"{len(outcome.slow)}"],
        *([name, f"{value:,}"] for name, value in outcome.counters.items()),
    ]
    for kind in KINDS:
        met = [one.longest * 1e3 for one in outcome.events if one.what == kind]
        if met:
            rows.append([f"{kind} ({len(met)}): longest call elsewhere, ms", f"{max(met):.0f}"])
    slowest = [one.longest for one in outcome.events]
    if slowest:
        rows.append(["the same, p50 of all events, ms", f"{percentile(slowest, 0.5) * 1e3:.0f}"])
    report.table("pool soak", ["what", "found"], rows)
    for finding in outcome.findings[:LISTED]:
        note("{kind}: {behaviour} of {path} at {at:.3f}: {detail}".format(**finding))
    for line in [*outcome.slow[:LISTED], *outcome.stale[:LISTED]]:
        note(line)


@click.command(help=__doc__)
@click.option("--nodes", "count", default=4, show_default=True)
@click.option("--clients", default=8, show_default=True)
@click.option("--seconds", default=60.0, show_default=True)
@click.option("--events", "number", default=6, show_default=True)
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Kinds of faults.")
@click.option("--stop", "stop_s", default=30.0, show_default=True, help="s of each stop")
@click.option("--copies", type=click.Choice(["drop", "keep"]), default="drop", show_default=True)
@click.option("--bucket", is_flag=True, help="A bucket is below all nodes.")
@click.option("--objects", default=2000, show_default=True)
@click.option("--seed", default=None, type=int, help="Of everything that is random; printed.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *,
    count: int,
    clients: int,
    seconds: float,
    number: int,
    kinds: str,
    stop_s: float,
    copies: str,
    bucket: bool,
    objects: int,
    seed: int | None,
    output: Path | None,
) -> None:
    """Run it."""
    chosen = kinds.split(",")
    if unknown := set(chosen) - set(KINDS):
        raise click.BadParameter(f"{unknown}, expected some of {', '.join(KINDS)}")
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    report = Report(
        "pool_soak",
        seed=seed,
        nodes=count,
        copies=copies,
        bucket=bucket,
        clients=clients,
        seconds=seconds,
    )
    task = Task("pool", "", 0, clients, seed, objects, evict=True, nodes=count)
    with scratch(Path("/var/tmp")) as folder:  # noqa: S108 (a fresh folder)
        folder.chmod(0o755)
        with pool(folder, count, copies, bucket=bucket) as (nodes, index):
            wait_s = POOL_WAIT + (FIRST_WAIT if bucket else 0.0)
            soak = PoolSoak(nodes, index, task, stop_s, wait_s)
            events = [soak.rng.choice(chosen) for _ in range(number)]
            outcome = soak.run(seconds, events)
            for node in nodes:
                counters = node.mounted.status()["pool"]["counters"]
                for name, value in counters.items():
                    outcome.counters[name] = outcome.counters.get(name, 0) + value
    report.document["results"] = asdict(outcome)
    show(report, outcome)
    report.write(output)
    sys.exit(1 if outcome.findings or outcome.slow else 0)


if __name__ == "__main__":
    main()
