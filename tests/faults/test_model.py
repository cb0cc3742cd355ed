"""kvfs against this machine's disk: the same random calls on both, and everything compared.

KVFS_EXAMPLES makes more than the usual number of walks. A failure prints its calls, and a line
(@reproduce_failure) that repeats it. With KVFS_SHRINK=1 it prints as few calls as possible, which
takes minutes. The walks leave out, or allow, the differences that SEMANTICS.md names: O_TMPFILE and
fallocate, set-id bits, O_DIRECT, the order of listings.
"""

import fcntl
import mmap
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvfs.control import request
from tests.faults.twins import Descriptor, Mapping, Twins
from tests.harness import Mounted, wait_for
from tests.semantics.syscalls import (
    AT_SYMLINK_FOLLOW,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    linkat,
    renameat2,
)

PHASES = [Phase.generate, Phase.shrink][: 1 + bool(os.environ.get("KVFS_SHRINK"))]
EXAMPLES = int(os.environ.get("KVFS_EXAMPLES", "15"))
STEPS = 60
MIB = 1 << 20
RAM = 64 * MIB
KINDS = {
    "kernel": f"ram={RAM >> 20}M,nvme={{tmp}}/nvme,nvme_size=2G",
    "kernel-nvme": "ram=0,nvme={tmp}/nvme,nvme_size=2G",
    "daemon": f"ram={RAM >> 20}M,nvme={{tmp}}/nvme,nvme_size=2G,passthrough=off",
}

PATHS = ["a", "b", "c.kv", "d", "d/a", "d/b", "d/e", "d/e/a"]
FILES = {"a": 70_000, "b": 100, "d/a": 4096, "d/e/a": 0}  # what every walk begins with
paths = st.sampled_from(PATHS)
odd_paths = paths | st.sampled_from([*PATHS, *PATHS, "a/", "d/", "d/e/", ".", "d/..", "b/c"])
targets = paths | st.sampled_from(["nowhere", ".", "../a", "d/../b", "x" * 300])
sizes = st.sampled_from([0, 1, 7, 100, 4095, 4096, 4097, 65_536, 70_001, 300_000])
offsets = sizes | st.integers(0, 10_000)
times = st.sampled_from([0, 1, 123_456_789_987_654_321, 999_999_999_999_999_999])
modes = st.sampled_from([0o600, 0o644, 0o400, 0o000, 0o755, 0o1777])
accesses = st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR])
FLAGS = ["TRUNC", "APPEND", "SYNC", "EXCL", "NOFOLLOW", "DIRECTORY"]
flags = st.sets(st.sampled_from(FLAGS), max_size=2)
attributes = st.sampled_from(["user.a", "user.b", "user.unknown"])
seeds = st.integers(0, 255)


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


class Walk(RuleBasedStateMachine):
    """One walk, in a directory of its own on each side."""

    descriptors = Bundle("descriptors")
    mappings = Bundle("mappings")

    def __init__(self, mounted: Mounted, disk: Path, number: int) -> None:
        super().__init__()
        self.mounted = mounted
        roots = (mounted.path / f"{number}", disk / f"{number}")
        for root in roots:
            (root / "top").mkdir(parents=True)
        self.twins = Twins((roots[0] / "top", roots[1] / "top"))
        self.looking = True
        self.interrupted = False  # which takes its time: once a walk

    @initialize(target=descriptors, looking=st.booleans())
    def begin(self, *, looking: bool) -> Any:  # noqa: ANN401 (Hypothesis's)
        """Begin a walk.

        Looking at everything after each step opens everything: half of them do not.
        """
        self.looking = looking
        for directory in ("d", "d/e"):
            self.on(os.mkdir, directory)
        for path, size in FILES.items():
            self.whole(path, size, seed=1)
        opened = [
            self.twins.opened(path, how, 0, by=None)
            for path, how in (
                ("a", os.O_RDWR),
                ("b", os.O_RDWR | os.O_APPEND),
                ("d/a", os.O_RDONLY),
            )
        ]
        return multiple(*opened)

    @invariant()
    def look_always(self) -> None:
        if self.looking:
            self.twins.compare()

    @rule()
    def look(self) -> None:
        self.twins.compare()

    def teardown(self) -> None:
        self.twins.let_go()
        self.twins.compare()
        self.mounted.check_gauges()
        self.twins.end()

    def both(self, what: str, call: Callable[[int, Path], Any]) -> Any:  # noqa: ANN401 (call's)
        return self.twins.both(what, call)

    # Opening

    @rule(target=descriptors, path=odd_paths, access=accesses, flags=flags, create=st.booleans())
    def open(self, path: str, access: int, flags: set[str], *, create: bool) -> Any:  # noqa: ANN401
        bits = sum(getattr(os, f"O_{name}") for name in flags) | os.O_NONBLOCK  # of fifos
        bits |= os.O_CREAT if create else 0
        found = self.twins.opened(path, access | bits, 0o640, by=None)
        return multiple() if found is None else found

    @rule(target=descriptors, descriptor=descriptors, access=accesses, truncate=st.booleans())
    def open_again(self, descriptor: Descriptor, access: int, *, truncate: bool) -> Any:  # noqa: ANN401
        """Open again, also a file without a name."""
        if descriptor not in self.twins.descriptors:
            return multiple()
        bits = access | os.O_NONBLOCK | (os.O_TRUNC if truncate else 0)
        found = self.twins.opened(descriptor.path, bits, 0, by=descriptor)
        return multiple() if found is None else found

    @rule(target=descriptors, descriptor=descriptors)
    def duplicate(self, descriptor: Descriptor) -> Any:  # noqa: ANN401
        if descriptor not in self.twins.descriptors:
            return multiple()
        fds = [os.dup(fd) for fd in descriptor.fds]
        return self.twins.adopt(fds, descriptor.path, append=descriptor.append)

    @rule(descriptor=consumes(descriptors))
    def close(self, descriptor: Descriptor) -> None:
        if descriptor in self.twins.descriptors:
            self.twins.close(descriptor)

    # Descriptors

    def through(self, descriptor: Descriptor, call: Callable[[int], Any]) -> None:
        if descriptor in self.twins.descriptors:
            self.both(f"{descriptor}", lambda side, _: call(descriptor.fds[side]))

    @rule(descriptor=descriptors, size=sizes)
    def read(self, descriptor: Descriptor, size: int) -> None:
        self.through(descriptor, lambda fd: os.read(fd, size))

    @rule(descriptor=descriptors, size=sizes, seed=seeds)
    def write(self, descriptor: Descriptor, size: int, seed: int) -> None:
        self.through(descriptor, lambda fd: os.write(fd, content(seed, size)))

    @rule(descriptor=descriptors, size=sizes, offset=offsets)
    def pread(self, descriptor: Descriptor, size: int, offset: int) -> None:
        self.through(descriptor, lambda fd: os.pread(fd, size, offset))

    @rule(descriptor=descriptors, size=sizes, offset=offsets, seed=seeds)
    def pwrite(self, descriptor: Descriptor, size: int, offset: int, seed: int) -> None:
        self.through(descriptor, lambda fd: os.pwrite(fd, content(seed, size), offset))

    @rule(
        descriptor=descriptors,
        offset=offsets | st.just(-1),
        whence=st.sampled_from([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END]),
    )
    def seek(self, descriptor: Descriptor, offset: int, whence: int) -> None:
        def call(fd: int) -> int | None:
            directory = os.path.isdir(f"/proc/self/fd/{fd}")
            if directory and whence == os.SEEK_END:
                return None  # ext4's end is a hash's, and beyond it is EINVAL
            at = os.lseek(fd, offset, whence)
            return None if directory else at

        self.through(descriptor, call)

    @rule(descriptor=descriptors, size=offsets)
    def ftruncate(self, descriptor: Descriptor, size: int) -> None:
        self.through(descriptor, lambda fd: os.ftruncate(fd, size))

    @rule(descriptor=descriptors, data_only=st.booleans())
    def fsync(self, descriptor: Descriptor, *, data_only: bool) -> None:
        self.through(descriptor, os.fdatasync if data_only else os.fsync)

    @rule(descriptor=descriptors, mode=modes)
    def fchmod(self, descriptor: Descriptor, mode: int) -> None:
        self.through(descriptor, lambda fd: os.fchmod(fd, mode))

    @rule(descriptor=descriptors, access=times, change=times)
    def futime(self, descriptor: Descriptor, access: int, change: int) -> None:
        def call(fd: int) -> tuple[int, int]:
            os.utime(fd, ns=(access, change))
            found = os.fstat(fd)
            return found.st_atime_ns, found.st_mtime_ns

        self.through(descriptor, call)

    @rule(descriptor=descriptors, append=st.booleans())
    def set_append(self, descriptor: Descriptor, *, append: bool) -> None:
        if descriptor.append and not append:
            return  # under passthrough the kernel goes on appending
        wanted = os.O_NONBLOCK | (os.O_APPEND if append else 0)
        self.through(descriptor, lambda fd: fcntl.fcntl(fd, fcntl.F_SETFL, wanted))

    @rule(descriptor=descriptors, name=attributes, size=st.integers(0, 100))
    def fsetxattr(self, descriptor: Descriptor, name: str, size: int) -> None:
        self.through(descriptor, lambda fd: os.setxattr(fd, name, bytes(size)))

    @rule(
        descriptor=descriptors, how=st.sampled_from([fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN])
    )
    def flock(self, descriptor: Descriptor, how: int) -> None:
        self.through(descriptor, lambda fd: fcntl.flock(fd, how | fcntl.LOCK_NB))

    @rule(descriptor=descriptors, source=descriptors, offset=offsets, to=offsets, size=sizes)
    def copy_range(
        self, descriptor: Descriptor, source: Descriptor, offset: int, to: int, size: int
    ) -> None:
        if descriptor.append:
            return  # the kernel copies to its end, also after the flag was taken away
        if source in self.twins.descriptors and descriptor in self.twins.descriptors:
            self.both(
                f"copy from {source} to {descriptor}",
                lambda side, _: os.copy_file_range(
                    source.fds[side], descriptor.fds[side], size, offset, to
                ),
            )

    @rule(descriptor=descriptors, path=paths)
    def link_descriptor(self, descriptor: Descriptor, path: str) -> None:
        """Give an open file another name; this fails for one that lost its last name."""
        if descriptor in self.twins.descriptors:
            self.both(
                f"link {descriptor} to {path}",
                lambda side, root: linkat(
                    f"/proc/self/fd/{descriptor.fds[side]}", f"{root}/{path}", AT_SYMLINK_FOLLOW
                ),
            )

    # Mappings

    @rule(target=mappings, descriptor=descriptors, writable=st.booleans())
    def map(self, descriptor: Descriptor, *, writable: bool) -> Any:  # noqa: ANN401
        if descriptor not in self.twins.descriptors:
            return multiple()
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        found = self.twins.map(descriptor, protection)
        return (found, writable) if found else multiple()

    @rule(mapped=mappings, offset=offsets, size=sizes, seed=seeds, sync=st.booleans())
    def poke(
        self, mapped: tuple[Mapping, bool], offset: int, size: int, seed: int, *, sync: bool
    ) -> None:
        mapping, writable = mapped
        if mapping in self.twins.mappings and writable:
            self.twins.poke(mapping, offset, content(seed, size), sync=sync)

    @rule(mapped=consumes(mappings))
    def unmap(self, mapped: tuple[Mapping, bool]) -> None:
        if mapped[0] in self.twins.mappings:
            self.twins.unmap(mapped[0])

    # Names

    def on(self, call: Callable[..., Any], *paths: str) -> None:
        self.both(
            f"{getattr(call, '__name__', 'call')} {paths}",
            # Not by Path: that would take a slash at the end away.
            lambda _, root: call(*(f"{root}/{path}" for path in paths)),
        )

    @rule(path=paths, size=sizes, seed=seeds)
    def whole(self, path: str, size: int, seed: int) -> None:
        """Write a whole file, the usual way."""

        def call(path: str) -> None:
            flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK
            with open(os.open(path, flags, 0o644), "wb", buffering=0) as file:
                file.write(content(seed, size))

        self.on(call, path)

    @rule(path=odd_paths, mode=modes)
    def mkdir(self, path: str, mode: int) -> None:
        self.on(lambda path: os.mkdir(path, mode), path)

    @rule(path=odd_paths)
    def rmdir(self, path: str) -> None:
        self.on(os.rmdir, path)

    @rule(path=odd_paths)
    def unlink(self, path: str) -> None:
        self.on(os.unlink, path)

    @rule(source=odd_paths, path=odd_paths)
    def rename(self, source: str, path: str) -> None:
        self.on(os.rename, source, path)

    @rule(
        source=odd_paths, path=odd_paths, how=st.sampled_from([RENAME_NOREPLACE, RENAME_EXCHANGE])
    )
    def rename_with(self, source: str, path: str, how: int) -> None:
        self.on(lambda source, path: renameat2(source, path, how), source, path)

    @rule(source=odd_paths, path=odd_paths, follow=st.booleans())
    def link(self, source: str, path: str, *, follow: bool) -> None:
        how = AT_SYMLINK_FOLLOW if follow else 0
        self.on(lambda source, path: linkat(source, path, how), source, path)

    @rule(target_=targets, path=odd_paths)
    def symlink(self, target_: str, path: str) -> None:
        self.on(lambda path: os.symlink(target_, path), path)

    @rule(path=paths)
    def mkfifo(self, path: str) -> None:
        self.on(os.mkfifo, path)

    @rule(path=paths)
    def make_socket(self, path: str) -> None:
        """Make a socket by a short path, because socket addresses take 107 bytes."""

        def call(path: str) -> None:
            parent, name = os.path.split(path)
            fd = os.open(parent, os.O_PATH | os.O_DIRECTORY)
            try:
                with closing(socket.socket(socket.AF_UNIX)) as made:
                    made.bind(f"/proc/self/fd/{fd}/{name}")
            finally:
                os.close(fd)

        self.on(call, path)

    @rule(path=odd_paths, size=offsets | st.just(-1))
    def truncate(self, path: str, size: int) -> None:
        self.on(lambda path: os.truncate(path, size), path)

    @rule(path=odd_paths, mode=modes)
    def chmod(self, path: str, mode: int) -> None:
        self.on(lambda path: os.chmod(path, mode), path)

    @rule(path=paths, user=st.sampled_from([-1, 0, 7]), group=st.sampled_from([-1, 0, 7]))
    def chown(self, path: str, user: int, group: int) -> None:
        self.on(lambda path: os.chown(path, user, group, follow_symlinks=False), path)

    @rule(path=odd_paths, access=times, change=times, follow=st.booleans())
    def utime(self, path: str, access: int, change: int, *, follow: bool) -> None:
        def call(path: str) -> tuple[int, int]:
            os.utime(path, ns=(access, change), follow_symlinks=follow)
            found = os.stat(path, follow_symlinks=follow)
            return found.st_atime_ns, found.st_mtime_ns

        self.on(call, path)

    @rule(
        path=odd_paths,
        name=attributes,
        size=st.integers(0, 100),
        how=st.sampled_from([0, os.XATTR_CREATE, os.XATTR_REPLACE]),
    )
    def set_attribute(self, path: str, name: str, size: int, how: int) -> None:
        self.on(lambda path: os.setxattr(path, name, bytes(size), how), path)

    @rule(path=odd_paths, name=attributes)
    def remove_attribute(self, path: str, name: str) -> None:
        self.on(lambda path: os.removexattr(path, name), path)

    # What kvfs may do at any time, and must not be seen

    @rule()
    def demote(self) -> None:
        """Copy every sealed object to NVMe."""
        wait_for(
            lambda: not request(self.mounted.path, "write_back")["objects_left"],
            "everything is written back",
        )

    @rule(parts=st.sampled_from([1, 8]))
    @precondition(lambda self: not self.interrupted)
    def press(self, parts: int) -> None:
        """Take memory away: only objects that NVMe has as well leave RAM."""
        if "ram" not in self.mounted.status()["tiers"]:
            return
        self.interrupted = True
        self.demote()
        for part in range(parts):
            path = self.mounted.path / f"pressure{part}"
            path.write_bytes(bytes(RAM * 3 // 4 // parts))
        for part in range(parts):
            (self.mounted.path / f"pressure{part}").unlink(missing_ok=True)

    @rule()
    @precondition(lambda self: not self.interrupted)
    def kill(self) -> None:
        """Let another daemon take over; open and mapped files stay so."""
        self.interrupted = True
        self.mounted.kill_daemon()

    @rule()
    @precondition(lambda self: not self.interrupted)
    def remount(self) -> None:
        self.interrupted = True
        self.twins.let_go()
        self.mounted.remount()


@pytest.fixture(scope="module", params=KINDS)
def mounted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mounted]:
    folder = tmp_path_factory.mktemp(request.param)
    found = Mounted(
        folder / "kv", KINDS[request.param].replace("{tmp}", str(folder)), folder / "kv.log"
    )
    found.path.mkdir()
    try:
        found.mount()
        yield found
        found.check_gauges()  # not the accounts: of sparse files the tiers take different room
        found.umount("--now")
        found.check_log()
    finally:
        found.clean_up()


@pytest.mark.slow
@pytest.mark.timeout(120 + 10 * EXAMPLES)
def test_kvfs_and_the_disk_agree(mounted: Mounted, tmp_path: Path) -> None:
    numbers = count()
    run_state_machine_as_test(
        cast(
            "type[RuleBasedStateMachine]",  # anything that makes one will do
            lambda: Walk(mounted, tmp_path, next(numbers)),
        ),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            phases=PHASES,
            derandomize=False,
            print_blob=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
