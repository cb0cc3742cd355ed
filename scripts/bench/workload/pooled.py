"""Names that the clients of all nodes of a pool share: each may be gone, and none may be wrong.

Contract: any client writes a missing block, whose name tells its bytes, as the hash of a prompt
does. A file of one client has versions; each tells its name, number and length, and the rest can
be computed. Only this client writes, replaces, renames and unlinks it. It must see its last version
or none, all others one of the versions, whole. Names below WRITTEN are written in place, so other
clients of the same node do not read them. `last` is for the check after the run. All clients
replace, rename and unlink the contested names: each has a version of some client, or is gone.
"""

import contextlib
import mmap
import os
import random
import struct
from collections.abc import Callable

from scripts.bench.workload import sealed
from scripts.bench.workload.held import HeldFiles
from scripts.bench.workload.task import Answer, Calls, Task, WrongError, expect

NAMES, WRITTEN = 20, 8
CONTESTED = 8  # names that all clients use
SIZES = (64, 4096, 30_000, 200_000, 1_500_000)
HELD = 3
HEAD = struct.Struct(">IIQQ")  # client, name, version, length
UNLINKED = -1


def folder_of(task: Task, client: int) -> str:
    """The directory of a client's own files."""
    return f"{task.folder}/own/{client}"


def content(task: Task, client: int, name: int, version: int) -> bytes:
    """A version of a client's file."""
    rng = random.Random(f"{task.seed}:{client}:{name}:{version}")  # noqa: S311 (repeatable)
    size = rng.choice(SIZES)
    return HEAD.pack(client, name, version, size) + rng.randbytes(size)


def verify(task: Task, path: str, found: bytes, client: int, name: int) -> int:
    """The version of these bytes. Raises WrongError if they are no version of the file."""
    if len(found) < HEAD.size:
        raise WrongError("wrong", path, f"{len(found)} bytes, expected a header")
    told = HEAD.unpack_from(found)
    expect(path, "client and name", told[:2], (client, name))
    expect(path, "content", found, content(task, client, name, told[2]))
    version: int = told[2]
    return version


class Pooled:
    """`answer` gets the misses, and the last versions."""

    def __init__(self, task: Task, calls: Calls, rng: random.Random, answer: Answer) -> None:
        self.task = task
        self.calls = calls
        self.rng = rng
        self.answer = answer
        self.last: dict[int, int] = {}  # by name: the version, or UNLINKED
        self.versions = 0
        self.held = HeldFiles(calls, rng, HELD)
        for path in (f"{task.folder}/own", folder_of(task, task.client), f"{task.folder}/all"):
            with contextlib.suppress(FileExistsError):
                calls.mkdir(path, 0o755)
        self.behaviours: dict[Callable[[], None], int] = {
            self.block: 20,
            self.block_mapped: 3,
            self.other: 10,
            self.write: 3,
            self.replace: 4,
            self.unlink: 2,
            self.rename: 2,
            self.look: 6,
            self.contest: 6,
            self.contested: 8,
            self.contest_unlink: 2,
            self.contest_rename: 2,
            self.hold: 3,
            self.held.read: 6,
            self.held.let_go: 3,
            self.listing: 1,
        }

    # Blocks

    def block(self) -> None:
        """Read a block, or write it."""
        index = sealed.choose(self.task, self.rng)
        if not sealed.verify(self.task, self.calls, index):
            self.answer.misses += 1
            self._store(index)

    def _store(self, index: int) -> None:
        path, data = sealed.path(self.task, index), sealed.content(self.task.seed, index)
        unfinished = f"{path}.{self.task.client}.tmp"
        for above in (f"{self.task.folder}/sealed", os.path.dirname(path)):
            with contextlib.suppress(FileExistsError):
                self.calls.mkdir(above, 0o755)
        fd = self.calls.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self.calls.write_all(fd, data, unfinished)
        self.calls.close(fd)
        with contextlib.suppress(FileNotFoundError):  # evicted already
            self.calls.rename(unfinished, path)

    def block_mapped(self) -> None:
        opened = self._open_block()
        if opened is None:
            return
        fd, path, data = opened
        try:
            expect(path, "size", self.calls.fstat(fd).st_size, len(data))
            with mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
                expect(path, "content as mapped", mapped[:], data)
        finally:
            self.calls.close(fd)

    def _open_block(self) -> tuple[int, str, bytes] | None:
        """A descriptor of a block, its path and bytes; None for a miss."""
        index = sealed.choose(self.task, self.rng)
        path = sealed.path(self.task, index)
        try:
            fd = self.calls.open(path, os.O_RDONLY)
        except FileNotFoundError:
            self.answer.misses += 1
            return None
        return fd, path, sealed.content(self.task.seed, index)

    # Files of one client

    def _own(self, name: int) -> str:
        return f"{folder_of(self.task, self.task.client)}/{name}.bin"

    def _next(self, name: int) -> bytes:
        self.versions += 1
        return content(self.task, self.task.client, name, self.versions)

    def write(self) -> None:
        """A version in the place of the one before."""
        name = self.rng.randrange(WRITTEN)
        path, data = self._own(name), self._next(name)
        fd = self.calls.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self.calls.write_all(fd, data, path)
        self.calls.close(fd)
        self.last[name] = self.versions
        self._see(name)

    def replace(self) -> None:
        """A version by the rename of another file."""
        name = self.rng.randrange(WRITTEN, NAMES)
        path, data = self._own(name), self._next(name)
        fd = self.calls.open(f"{path}.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self.calls.write_all(fd, data, path)
        self.calls.rename(f"{path}.tmp", path)  # while it is open nothing may drop it
        self.calls.close(fd)
        self.last[name] = self.versions
        self._see(name)

    def unlink(self) -> None:
        name = self.rng.randrange(NAMES)
        with contextlib.suppress(FileNotFoundError):
            self.calls.unlink(self._own(name))
            self.last[name] = UNLINKED
        if self.last.get(name) == UNLINKED:
            self._see(name)

    def rename(self) -> None:
        """A file gets a name that is then a version of another name: so it keeps its own bytes."""
        name = self.rng.randrange(NAMES)
        away = f"{self._own(name)}.away"
        try:
            self.calls.rename(self._own(name), away)
        except FileNotFoundError:
            return
        before, self.last[name] = self.last.get(name, UNLINKED), UNLINKED
        self._see(name)
        try:
            self.calls.rename(away, self._own(name))
        except FileNotFoundError:  # evicted meanwhile
            return
        self.last[name] = before
        self._see(name)

    def look(self) -> None:
        self._see(self.rng.randrange(NAMES))

    def _see(self, name: int) -> None:
        """See the last version of an own file, or a miss."""
        path, wanted = self._own(name), self.last.get(name, UNLINKED)
        try:
            found = self.calls.read_all(path)
        except FileNotFoundError:
            self.answer.misses += wanted != UNLINKED
            return
        version = verify(self.task, path, found, self.task.client, name)
        if version != wanted:
            raise WrongError("wrong", path, f"version {version}, expected {wanted} or none")

    def other(self) -> None:
        """Read a file of another client."""
        client = self.rng.randrange(self.task.clients)
        near = (client - self.task.client) % self.task.nodes == 0
        name = self.rng.randrange(WRITTEN if near else 0, NAMES)
        path = f"{folder_of(self.task, client)}/{name}.bin"
        try:
            found = self.calls.read_all(path)
        except FileNotFoundError:
            return
        verify(self.task, path, found, client, name)

    # Names of all clients

    def _contested(self) -> tuple[str, int]:
        """The path of a contested name, and its number in the content."""
        number = self.rng.randrange(CONTESTED)
        return f"{self.task.folder}/all/{number}.bin", NAMES + number

    def contest(self) -> None:
        path, name = self._contested()
        unfinished, data = f"{path}.{self.task.client}.tmp", self._next(name)
        fd = self.calls.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self.calls.write_all(fd, data, unfinished)
        self.calls.rename(unfinished, path)  # while it is open nothing may drop it
        self.calls.close(fd)

    def contested(self) -> None:
        path, name = self._contested()
        with contextlib.suppress(FileNotFoundError):
            found = self.calls.read_all(path)
            expect(path, "header", len(found[: HEAD.size]), HEAD.size)
            verify(self.task, path, found, HEAD.unpack_from(found)[0], name)

    def contest_unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.calls.unlink(self._contested()[0])

    def contest_rename(self) -> None:
        """The name goes to another one and back: the other one is none that another client uses."""
        path, _ = self._contested()
        away = f"{path}.{self.task.client}.away"
        with contextlib.suppress(FileNotFoundError):
            self.calls.rename(path, away)
            self.calls.rename(away, path)

    # Descriptors and listings

    def hold(self) -> None:
        opened = self._open_block()
        if opened is not None:
            self.held.add(*opened)

    def listing(self) -> None:
        """A listing has each name once, and only names that some client has made."""
        client = self.rng.randrange(self.task.clients)
        path = folder_of(self.task, client)
        try:
            names = self.calls.listdir(path)
        except FileNotFoundError:
            return
        expect(path, "names, each once", len(set(names)), len(names))
        made = {f"{name}.bin{end}" for name in range(NAMES) for end in ("", ".tmp", ".away")}
        expect(path, "names that no client has made", set(names) - made, set())

    def finish(self) -> None:
        self.held.let_all_go()
        self.answer.last = {str(name): version for name, version in self.last.items()}
