"""Room for open writers: their bytes count during the write, at no other namespace's expense.

The daemon checks a limit from time to time. So each test waits until the limit holds, with the
files still open and growing. Each test says by how much writers may pass the limit meanwhile.
"""

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import Mount
from tests.harness import Mounted, local, wait_for
from tests.leases import Borrower
from tests.semantics.syscalls import NOBODY, libc, opened, refused
from tests.semantics.test_namespaces import change, left, namespace, numbered, show, write
from tests.semantics.test_prefixes import ROOT, chain
from tests.semantics.test_prefixes import namespace as prefixes

M = 1 << 20
MODES = ["passthrough=auto", "passthrough=off"]
TIERS = ["ram=64M", "ram=0,nvme={tmp}/nvme,nvme_size=64M", "ram=32M,nvme={tmp}/nvme,nvme_size=64M"]
# The daemon looks at writers of any tier by the same code, and serves writes by the same.
CASES = [(tier, MODES[0]) for tier in TIERS] + [(TIERS[2], MODES[1])]
SLACK = 2 * M  # what may be written between two looks, of writers that wait for the daemon
CROWDED = "nothing is demoted: the NVMe tier has no room"  # as long as the file is there
LOST = "is (cut off|dropped at its close)"


def taken(kv: Mounted, tier: str) -> int:
    """Bytes of a tier's backing files. Files without a name count too, unlike in its accounts."""
    path = local(kv.status())[tier]["path"]
    found = 0
    for file in Path(path, "objects").rglob("*.*"):
        try:
            found += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return found


def sizes(kv: Mounted) -> dict[str, int]:
    return {name: tier["capacity_bytes"] for name, tier in local(kv.status()).items()}


def within(kv: Mounted, limit: int, *, of: str = "") -> None:
    """Wait until all tiers together hold no more than `limit`, with files open."""
    names = [of] if of else list(sizes(kv))
    wait_for(
        lambda: sum(taken(kv, name) for name in names) <= limit,
        f"no more than {limit} bytes are held",
    )


class Writers:
    """Open files that grow."""

    def __init__(self, paths: list[Path], stack: ExitStack) -> None:
        flags = os.O_CREAT | os.O_RDWR
        self.files = [os.open(path, flags) for path in paths]
        self.open = set(self.files)
        self.errors: list[int] = []
        stack.callback(self.close)

    def grow(self, size: int = M) -> bool:
        """Write this much more to each file; whether no write failed."""
        for file in self.files:
            try:
                os.write(file, b"g" * size)
            except OSError as error:
                self.errors.append(error.errno or 0)
        return not self.errors

    def close(self) -> list[int]:
        """Close all; return the errno of each close, 0 for success."""
        found = []
        for file in list(self.open):
            self.open.discard(file)
            try:
                os.close(file)
                found.append(0)
            except OSError as error:
                found.append(error.errno or 0)
        return found


@contextmanager
def writers(paths: list[Path]) -> Iterator[Writers]:
    with ExitStack() as stack:
        yield Writers(paths, stack)


@pytest.mark.parametrize(("tier", "mode"), CASES)
def test_a_hard_quota_holds_while_files_are_written(mount: Mount, tier: str, mode: str) -> None:
    kv = mount(f"{tier},{mode}")
    kv.allow_log(LOST)
    bob, alice = namespace(kv, "bob", quota_hard="4M"), namespace(kv, "alice")
    write(alice, numbered(0, 15))
    kv.idle()
    before = sum(taken(kv, name) for name in sizes(kv))
    with writers([bob / f"{number}.bin" for number in range(12)]) as grown:
        for _ in range(16):
            grown.grow()
            within(kv, before + 4 * M + SLACK + 15 * M)  # RAM's copies on NVMe may come meanwhile
        assert left(alice, numbered(0, 15)) == numbered(0, 15)
        write(alice, numbered(15, 20))
        assert left(alice, numbered(0, 20)) == numbered(0, 20)
        said = grown.close()
        assert {*said, *grown.errors} - {0} == {errno.EDQUOT}
    kv.idle()
    assert show(kv, "bob")["bytes"] <= 4 * M
    assert left(alice, numbered(0, 20)) == numbered(0, 20)


@pytest.mark.parametrize(("tier", "mode"), CASES)
def test_growing_files_take_no_room_from_smaller_namespaces(
    mount: Mount, tier: str, mode: str
) -> None:
    """Also without a quota, the namespace furthest over its share gives room."""
    kv = mount(f"{tier},{mode}")
    kv.allow_log(LOST)
    kv.allow_log(CROWDED)
    bob, alice = namespace(kv, "bob"), namespace(kv, "alice")
    write(alice, numbered(0, 15))
    kv.idle()
    limits = sizes(kv)
    with writers([bob / f"{number}.bin" for number in range(12)]) as grown:
        for _ in range(20):  # 240 MiB
            grown.grow()
            if "nvme" in limits:
                within(kv, limits["nvme"] + SLACK, of="nvme")
        assert left(alice, numbered(0, 15)) == numbered(0, 15)
        write(alice, numbered(15, 20))
        assert left(alice, numbered(0, 20)) == numbered(0, 20)
        assert errno.ENOSPC in {*grown.close(), *grown.errors}
    kv.idle()
    assert left(alice, numbered(0, 20)) == numbered(0, 20)


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_can_never_fit_stops_soon(mount: Mount, mode: str) -> None:
    kv = mount(f"ram=16M,nvme={{tmp}}/nvme,nvme_size=64M,{mode}")
    kv.allow_log(LOST)
    kv.allow_log(CROWDED)
    other, large = namespace(kv, "other"), namespace(kv, "large")
    write(other, numbered(0, 30))
    kv.idle()
    with writers([large / "dd"]) as grown:
        for _ in range(375):
            grown.grow()
        within(kv, 64 * M + SLACK, of="nvme")
        assert left(other, numbered(0, 30)) == numbered(0, 30)
        found = os.statvfs(kv.path)
        assert found.f_bavail <= found.f_blocks
        assert not (large / "dd").exists() or mode == "passthrough=off"
        assert errno.ENOSPC in {*grown.close(), *grown.errors}
    kv.idle()
    assert left(other, numbered(0, 30)) == numbered(0, 30)
    # Where the daemon serves the bytes it was told at the write, and what fits stays.
    limit = 64 * M if mode == "passthrough=off" else 0
    wait_for(lambda: show(kv, "large")["bytes"] <= limit, "it has gone")


@pytest.mark.parametrize("mode", MODES)
def test_open_of_a_cut_off_file_fails(mount: Mount, mode: str) -> None:
    """Otherwise a reader would find a gap in place of bytes."""
    kv = mount(f"ram=32M,nvme={{tmp}}/nvme,nvme_size=64M,{mode}")
    kv.expect_log("'space/a.bin' is (cut off|dropped at its close)")
    space = namespace(kv, "space", quota_hard="4M")
    path = space / "a.bin"
    with writers([path]) as grown:
        for _ in range(3):
            grown.grow()
        change(kv, "space", quota_hard="1M")
        if mode == "passthrough=auto":
            wait_for(lambda: grown.grow() and not path.exists(), "it has no name any more")
            with refused(errno.ENOENT):
                os.open(path, os.O_RDONLY)
            with refused(errno.ENOENT):
                os.open(f"/proc/self/fd/{grown.files[0]}", os.O_RDONLY)
            path.write_bytes(b"another")
            assert path.read_bytes() == b"another"
        assert grown.close() == [errno.EDQUOT]
    if mode == "passthrough=auto":
        assert path.read_bytes() == b"another"


def test_readers_of_a_cut_off_file_keep_none_of_its_bytes(mount: Mount) -> None:
    """Its writer has left before the daemon's next check, so that nothing is emptied later."""
    kv = mount("ram=32M,nvme={tmp}/nvme,nvme_size=64M")
    kv.allow_log(LOST)
    space = namespace(kv, "space", quota_hard="4M")
    with ExitStack() as stack:
        for number in range(16):
            path = space / f"{number}.bin"
            with writers([path]) as grown:
                stack.enter_context(opened(path, os.O_RDONLY))
                for _ in range(12):
                    grown.grow()
                assert grown.close() == [errno.EDQUOT]
        within(kv, 4 * M)
        kv.kill_daemon()
        within(kv, 4 * M)


def test_cut_off_file_stays_cut_off_after_a_takeover(mount: Mount) -> None:
    kv = mount("ram=32M,nvme={tmp}/nvme,nvme_size=64M")
    kv.expect_log("is cut off")
    space = namespace(kv, "space", quota_hard="4M")
    with writers([space / "a.bin"]) as grown:
        wait_for(lambda: grown.grow() and not (space / "a.bin").exists(), "it is cut off")
        kv.kill_daemon()
        for _ in range(64):
            grown.grow()
        within(kv, 4 * M + SLACK)
        assert not (space / "a.bin").exists()
        assert grown.close() == [errno.EDQUOT]
    kv.idle()


@pytest.mark.parametrize("mode", MODES)
def test_renamed_open_file_counts_in_its_new_namespace(mount: Mount, mode: str) -> None:
    kv = mount(f"ram=32M,nvme={{tmp}}/nvme,nvme_size=64M,{mode}")
    kv.allow_log(LOST)
    space = namespace(kv, "space", quota_hard="4M")
    with writers([kv.path / "a.bin"]) as grown:
        grown.grow(3 * M)
        (kv.path / "a.bin").rename(space / "a.bin")
        for _ in range(16):
            grown.grow()
        within(kv, 4 * M + SLACK)
        assert {*grown.close(), *grown.errors} - {0} == {errno.EDQUOT}


@pytest.mark.parametrize("mode", MODES)
def test_an_open_file_is_not_renamed_into_a_quota_that_it_does_not_fit(
    mount: Mount, mode: str
) -> None:
    kv = mount(f"ram=32M,nvme={{tmp}}/nvme,nvme_size=64M,{mode}")
    space = namespace(kv, "space", quota_hard="4M")
    with writers([kv.path / "a.bin"]) as grown:
        grown.grow(6 * M)
        with pytest.raises(OSError, match="quota exceeded"):
            (kv.path / "a.bin").rename(space / "a.bin")
        assert not list(space.iterdir())
        assert grown.close() == [0]
    assert (kv.path / "a.bin").stat().st_size == 6 * M


@pytest.mark.parametrize("mode", MODES)
def test_an_open_file_is_cut_off_when_its_quota_becomes_less(mount: Mount, mode: str) -> None:
    kv = mount(f"ram=32M,nvme={{tmp}}/nvme,nvme_size=64M,{mode}")
    kv.allow_log(LOST)
    space = namespace(kv, "space", quota_hard="16M")
    with writers([space / "a.bin"]) as grown:
        grown.grow(6 * M)
        os.setxattr(space, "user.kvfs.quota_hard", b"4M")
        wait_for(lambda: not list(space.iterdir()), "it has no name any more")
        assert grown.close() == [errno.EDQUOT]


@pytest.mark.parametrize("mode", MODES)
def test_unpublished_files_count_for_the_quota(mount: Mount, mode: str) -> None:
    kv = mount(f"ram=32M,nvme={{tmp}}/nvme,nvme_size=64M,{mode}")
    kv.allow_log(LOST)
    space = namespace(kv, "space", quota_hard="4M", publish="close")
    with writers([space / f"{number}.bin" for number in range(4)]) as grown:
        for _ in range(16):
            grown.grow()
        within(kv, 4 * M + SLACK)
        assert errno.EDQUOT in {*grown.close(), *grown.errors}
    kv.idle()
    assert sum(path.stat().st_size for path in space.iterdir()) <= 4 * M


@pytest.mark.parametrize("mode", MODES)
def test_a_lease_ends_when_its_block_grows_beyond_it(mount: Mount, mode: str) -> None:
    """The writer writes on, or sets more aside with fallocate(2), which no size shows."""
    kv = mount(f"ram=64M,{mode}")
    kv.expect_log("is cut off")
    space, keys = prefixes(kv), chain(3)
    client = Borrower(space)
    made, leases = client.make(ROOT, keys, 4096)
    assert len(made) == 3
    os.pwrite(made[0], b"x" * 4096, 0)
    os.pwrite(made[1], b"x" * 4096, 0)
    for at in range(48):
        os.pwrite(made[1], b"y" * M, 4096 + at * M)
    os.posix_fallocate(made[2], 0, 48 * M)
    within(kv, 1 * M)
    with refused(errno.ESTALE):
        client.done(leases[1:])
    for descriptor in made[1:]:
        os.pwrite(descriptor, b"z" * 8 * M, 0)
    within(kv, 1 * M)
    client.done(leases[:1])
    for descriptor in made:
        os.close(descriptor)
    client.close()
    files = [path.name for path in space.rglob("*") if path.is_file()]
    assert files == [keys[0].hex()]


@pytest.mark.parametrize("mode", MODES)
def test_small_writers_in_an_empty_mount_take_nothing(mount: Mount, mode: str) -> None:
    """A file in a new directory has no expected size: 64 MiB would be set aside for each."""
    kv = mount(f"ram=0,nvme={{tmp}}/nvme,nvme_size=512M,{mode}")
    write(kv.path, numbered(0, 8))
    kv.idle()
    folders = [kv.path / f"new{number}" for number in range(16)]
    for folder in folders:
        folder.mkdir()
    with writers([folder / "a.bin" for folder in folders]) as grown:
        grown.grow(100)
        assert left(kv.path, numbered(0, 8)) == numbered(0, 8)
        assert grown.close() == [0] * 16
    assert left(kv.path, numbered(0, 8)) == numbered(0, 8)
    assert kv.counter("dropped") == 0


@pytest.mark.parametrize("mode", MODES)
def test_small_writers_are_let_in_where_nothing_may_go(mount: Mount, mode: str) -> None:
    """Room that is only set aside for other writers does not refuse one: no bytes would be lost."""
    kv = mount(f"ram=0,nvme={{tmp}}/nvme,nvme_size=64M,{mode}")
    folders = [kv.path / f"new{number}" for number in range(64)]
    for folder in folders:
        folder.mkdir()
    with writers([folder / "a.bin" for folder in folders]) as grown:
        assert grown.grow(100)
        assert grown.close() == [0] * 64
    assert [(folder / "a.bin").stat().st_size for folder in folders] == [100] * 64


@pytest.mark.parametrize("mode", MODES)
def test_writers_that_grow_a_little_are_no_reason_to_refuse_one(mount: Mount, mode: str) -> None:
    kv = mount(f"ram=32M,nvme={{tmp}}/nvme,nvme_size=64M,{mode}")
    paths = [kv.path / f"{number}.bin" for number in range(256)]
    with ExitStack() as stack:
        files = [stack.enter_context(opened(path, os.O_CREAT | os.O_WRONLY)) for path in paths[:4]]
        for path in paths[4:]:
            files.append(stack.enter_context(opened(path, os.O_CREAT | os.O_WRONLY)))
            assert os.write(files[-1], b"g" * 100_000) == 100_000
    assert {path.stat().st_size for path in paths[4:]} == {100_000}


@pytest.mark.parametrize(("tier", "mode"), CASES)
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_create_evicts_no_object_before_bytes_come(
    mount: Mount,
    tier: str,
    mode: str,
    known: bool,  # noqa: FBT001
) -> None:
    """This also holds in a full tier, where a new file takes only what an empty one takes.

    A copy in RAM may go before, if NVMe has one too.
    """
    kv = mount(f"{tier},{mode}")
    names = numbered(0, 160)
    write(kv.path, names)
    # The last bytes may be in the headroom of RAM, more of them on a busy machine. The next new
    # file makes the headroom free again: that room is not for a file without bytes.
    (kv.path / "last.kv").write_bytes(b"x")
    kv.idle()
    folders = [kv.path if known else kv.path / f"new{number}" for number in range(8)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    before = kv.counter("dropped")
    assert before > 0, "the tiers are full"
    suffix = "kv" if known else "bin"
    paths = [folder / f"x{number}.{suffix}" for number, folder in enumerate(folders)]
    with writers(paths) as grown:
        grown.grow(100)
        kv.status()
        assert kv.counter("dropped") <= before + 1
        assert grown.close() == [0] * 8
    assert kv.counter("dropped") <= before + 1


@pytest.mark.parametrize(("tier", "mode"), CASES)
def test_idle_namespace_gives_room_back_to_a_writer(mount: Mount, tier: str, mode: str) -> None:
    """A namespace that has all of an idle mount gives it back to a new one, file by file."""
    kv = mount(f"{tier},{mode}")
    idle, busy = namespace(kv, "idle"), namespace(kv, "busy")
    write(idle, numbered(0, 150))
    for begin in range(0, 20, 4):
        names = numbered(begin, begin + 4)
        with ExitStack() as stack:
            files = [stack.enter_context(opened(busy / n, os.O_CREAT | os.O_WRONLY)) for n in names]
            for name, file in zip(names, files, strict=True):
                assert os.write(file, name.encode() * (M // len(name))) > 0
        assert left(busy, names) == names
    kv.idle()
    assert left(busy, numbered(0, 20)) == numbered(0, 20)
    assert len(left(idle, numbered(0, 150))) >= 20


def map_and_close(path: str) -> None:
    """Write 1 MiB, and keep only a mapping of it; Python's own mmap keeps a descriptor."""
    with Path(path).open("wb", buffering=0) as stream:
        stream.write(b"m" * M)
    with Path(path).open("rb", buffering=0) as stream:
        assert libc.mmap(None, M, mmap.PROT_READ, mmap.MAP_SHARED, stream.fileno(), 0) > 0


@contextmanager
def mapping(directory: Path, files: int, *, unlink: bool) -> Iterator[int]:
    """Another user maps files of 1 MiB, this many or fewer; yields the mapped bytes."""
    done, begun = os.pipe()
    hold, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.chdir(directory)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        mapped = 0
        try:
            for number in range(files):
                map_and_close(str(number))
                mapped += M
                if unlink:
                    os.unlink(str(number))
        except OSError:
            pass
        os.write(begun, struct.pack("q", mapped))
        os.read(hold, 1)
        os._exit(0)
    os.close(hold)
    try:
        yield struct.unpack("q", os.read(done, 8))[0]
    finally:
        for descriptor in (end, done, begun):
            os.close(descriptor)
        os.waitpid(child, 0)


def counts(kv: Mounted) -> int:
    """The bytes in the accounts of all tiers."""
    return sum(tier["used_bytes"] + tier["reserved_bytes"] for tier in local(kv.status()).values())


@pytest.mark.parametrize("unlink", [True, False], ids=["unlinked", "dropped"])
@pytest.mark.parametrize("tier", TIERS)
def test_mappings_of_unlinked_files_count(mount: Mount, tier: str, *, unlink: bool) -> None:
    """Files that only a mapping keeps count for the hard quota, and for the tier."""
    kv = mount(f"{tier},allow_other")
    kv.allow_log(LOST)
    bob, alice = namespace(kv, "bob", quota_hard="8M"), namespace(kv, "alice")
    os.chown(bob, NOBODY, NOBODY)
    write(alice, numbered(0, 15))
    kv.idle()
    before = counts(kv)
    with mapping(bob, 128, unlink=unlink) as mapped:
        assert 4 * M < mapped <= 8 * M + 8 * SLACK
        wait_for(lambda: counts(kv) >= before + mapped, "they count")
        with pytest.raises(OSError, match="quota exceeded"):
            (bob / "another").write_bytes(b"a" * 8 * M)
        assert left(alice, numbered(0, 15)) == numbered(0, 15)
    wait_for(lambda: fits(bob / "another"), "they do not count any more")


@pytest.mark.parametrize("opened_first", [False, True], ids=["sealed", "written"])
def test_pages_of_gaps_that_are_mapped_count(mount: Mount, *, opened_first: bool) -> None:
    """Memory takes room for a page of a gap that a program reads in a mapping, and keeps it."""
    kv = mount("ram=64M")
    path = kv.path / "gap.bin"
    with ExitStack() as stack:
        with path.open("wb") as stream:
            stream.truncate(16 * M)
            if opened_first:
                file = stack.enter_context(opened(path, os.O_RDONLY))
        if not opened_first:
            kv.idle()
            file = stack.enter_context(opened(path, os.O_RDONLY))
        mapped = stack.enter_context(mmap.mmap(file, 0, prot=mmap.PROT_READ))
        assert not any(mapped[at] for at in range(0, 16 * M, 4096))
        wait_for(lambda: counts(kv) >= taken(kv, "ram"), "all that it takes counts")
        assert (taken(kv, "ram") > 0) == opened_first
    assert path.read_bytes() == bytes(16 * M)


def fits(path: Path) -> bool:
    """Whether a quota of 8 MiB has room for a file of 6."""
    try:
        path.write_bytes(b"a" * 6 * M)
        return path.stat().st_size == 6 * M
    except OSError:
        return False


@pytest.mark.parametrize("tier", TIERS)
def test_mappings_take_no_room_from_smaller_namespaces(mount: Mount, tier: str) -> None:
    """Without a quota the tiers bound mappings. Other namespaces keep their share."""
    kv = mount(f"{tier},allow_other")
    kv.allow_log(LOST)
    kv.allow_log(CROWDED)
    bob, alice = namespace(kv, "bob"), namespace(kv, "alice")
    os.chown(bob, NOBODY, NOBODY)
    write(alice, numbered(0, 15))
    kv.idle()
    limit = sum(sizes(kv).values())
    with mapping(bob, 256, unlink=True) as mapped:
        assert 16 * M < mapped <= limit + 8 * SLACK
        assert left(alice, numbered(0, 15)) == numbered(0, 15)
    kv.idle()
    assert left(alice, numbered(0, 15)) == numbered(0, 15)
