"""Names that all clients work on at the same time.

Contract: whatever they do, each sees whole files, each name once, and one winner. `prepare` makes
what they work on, and `disagreements` says at the end where their answers and the files differ.
"""

import ctypes
import errno
import hashlib
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.bench.workload.task import Answer, Calls, Task, WrongError, expect

PUBLISHED = 6
TOKENS, PLACES = 8, 14
STABLE = 150
LOGS = 2
ROUND = 0.2  # s; in each, one name is fought for
RECORD = struct.Struct("<HI10s16s")  # client, number, filling, digest of what is before it
SIZES = (0, 10, 4096, 30_000, 200_000)
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def _renameat2(old: str, new: str, flags: int) -> None:
    if _libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), old)


def whole(body: bytes) -> bytes:
    """Return the content of a published file, of which no client may see only a part."""
    return hashlib.sha256(body).digest() + body


def record(client: int, number: int) -> bytes:
    """One entry of a log: neither half of it is good for anything."""
    head = RECORD.pack(client, number, b"x" * 10, b"")[:-16]
    return head + hashlib.blake2b(head, digest_size=16).digest()


def prepare(folder: Path) -> None:
    """Make what the clients share."""
    for name in ("published", "tokens", "stable", "logs", "contended"):
        (folder / name).mkdir(parents=True)
    for number in range(PUBLISHED):
        (folder / "published" / f"{number}").write_bytes(whole(b"first"))
    for number in range(TOKENS):
        (folder / "tokens" / f"{number}").write_bytes(whole(b"token %d" % number))
    for number in range(STABLE):
        (folder / "stable" / f"stays.{number}").write_bytes(b"")
    for number in range(LOGS):
        (folder / "logs" / f"{number}").write_bytes(b"")


class Shared:
    """`answer` collects what has to be compared with the other clients' answers."""

    def __init__(self, task: Task, calls: Calls, rng: random.Random, answer: Answer) -> None:
        self.folder = f"{task.folder}/shared"
        self.client = task.client
        self.calls = calls
        self.rng = rng
        self.answer = answer
        self._count = 0
        self._round = 0
        self.behaviours: dict[Callable[[], None], int] = {
            self.publish: 4,
            self.read_published: 6,
            self.move_token: 6,
            self.read_token: 3,
            self.list_stable: 2,
            self.come_and_go: 3,
            self.contend: 3,
            self.log: 3,
        }

    def publish(self) -> None:
        self._count += 1
        path = f"{self.folder}/published/.{self.client}.{self._count}.tmp"
        data = whole(self.rng.randbytes(self.rng.choice(SIZES)))
        fd = self.calls.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self.calls.write_all(fd, data, path)
        self.calls.close(fd)
        self.calls.rename(path, f"{self.folder}/published/{self.rng.randrange(PUBLISHED)}")

    def read_published(self) -> None:
        path = f"{self.folder}/published/{self.rng.randrange(PUBLISHED)}"
        self._check_whole(path, self.calls.read_all(path))

    @staticmethod
    def _check_whole(path: str, data: bytes) -> None:
        if data != whole(data[32:]):
            raise WrongError("wrong", path, f"{len(data)} bytes are not what anybody published")

    def _place(self) -> str:
        return f"{self.folder}/tokens/{self.rng.randrange(PLACES)}"

    def move_token(self) -> None:
        """Tokens change places; none is ever replaced, so none may get lost."""
        flags = self.rng.choice([RENAME_NOREPLACE, RENAME_EXCHANGE])
        old, new = self._place(), self._place()
        try:
            self.calls.timed("renameat2", lambda: _renameat2(old, new, flags))
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.EEXIST}:
                raise

    def read_token(self) -> None:
        path = self._place()
        try:
            data = self.calls.read_all(path)
        except FileNotFoundError:
            return  # the place is free
        self._check_whole(path, data)
        if not data[32:].startswith(b"token "):
            raise WrongError("wrong", path, f"{data[32:80]!r} is no token")

    def list_stable(self) -> None:
        path = f"{self.folder}/stable"
        seen = Counter(self.calls.listdir(path))
        twice = [name for name, times in seen.items() if times > 1]
        expect(path, "names listed twice", twice, [])
        missing = [f"stays.{n}" for n in range(STABLE) if f"stays.{n}" not in seen]
        expect(path, "names not listed", missing, [])

    def come_and_go(self) -> None:
        self._count += 1
        path = f"{self.folder}/stable/{self.client}.{self._count}"
        self.calls.mkdir(path)
        self.calls.rename(path, f"{path}.moved")
        self.calls.rmdir(f"{path}.moved")

    def contend(self) -> None:
        """Of all who create one name with O_EXCL, one wins."""
        now = int(time.monotonic() / ROUND)
        if now == self._round:
            return
        self._round = now
        path = f"{self.folder}/contended/{now}"
        self.answer.contended.append(now)
        try:
            fd = self.calls.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return
        self.calls.write_all(fd, b"%d" % self.client, path)
        self.calls.close(fd)
        self.answer.won.append(now)

    def log(self) -> None:
        path = f"{self.folder}/logs/{self.rng.randrange(LOGS)}"
        fd = self.calls.open(path, os.O_WRONLY | os.O_APPEND)
        self.calls.write_all(fd, record(self.client, self.answer.logged), path)
        self.answer.logged += 1
        self.calls.close(fd)


def disagreements(folder: Path, answers: list[Answer]) -> Iterator[str]:
    """Yield contradictions between the clients' answers and the directory that they have left."""
    yield from _wrong_winners(folder, answers)
    yield from _wrong_logs(folder, answers)
    tokens = sorted(path.read_bytes()[32:] for path in (folder / "tokens").iterdir())
    if tokens != [b"token %d" % number for number in range(TOKENS)]:
        yield f"tokens: {tokens}, expected {TOKENS} different ones"
    left = [path.name for path in (folder / "stable").iterdir()]
    if sorted(left) != sorted(f"stays.{number}" for number in range(STABLE)):
        yield f"stable: {len(left)} entries, expected {STABLE}"
    left = sorted(path.name for path in (folder / "published").iterdir())
    if left != [f"{number}" for number in range(PUBLISHED)]:
        yield f"published: {left}, expected {PUBLISHED} files"


def _wrong_winners(folder: Path, answers: list[Answer]) -> Iterator[str]:
    tried = {number for answer in answers for number in answer.contended}
    winners: dict[int, list[int]] = {number: [] for number in tried}
    for client, answer in enumerate(answers):
        for number in answer.won:
            winners[number].append(client)
    for number, found in winners.items():
        if len(found) != 1:
            yield f"contended/{number}: winners are {found}, expected one"
        elif (folder / "contended" / f"{number}").read_bytes() != b"%d" % found[0]:
            yield f"contended/{number}: not written by its winner, client {found[0]}"


def _wrong_logs(folder: Path, answers: list[Answer]) -> Iterator[str]:
    numbers: dict[int, list[int]] = {client: [] for client in range(len(answers))}
    for path in sorted((folder / "logs").iterdir()):
        data = path.read_bytes()
        if len(data) % RECORD.size:
            yield f"logs/{path.name}: {len(data)} bytes, expected records of {RECORD.size}"
        last: dict[int, int] = {}
        for client, number, filling, digest in RECORD.iter_unpack(
            data[: len(data) // RECORD.size * RECORD.size]
        ):
            if record(client, number) != RECORD.pack(client, number, filling, digest):
                yield f"logs/{path.name}: a torn record"
                break
            if number <= last.get(client, -1):
                yield f"logs/{path.name}: record {number} of client {client} is out of order"
            last[client] = number
            numbers[client].append(number)
    for client, answer in enumerate(answers):
        if sorted(numbers[client]) != list(range(answer.logged)):
            found = len(numbers[client])
            yield f"logs: {found} records of client {client}, expected {answer.logged}"
