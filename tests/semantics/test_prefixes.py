import errno
import os
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from kvfs import matching, prefix
from kvfs.control import request
from tests.harness import Mounted, wait_for
from tests.leases import Borrower
from tests.semantics.syscalls import as_nobody, refused

ROOT = prefix.root_key("a fingerprint")
NUMBERS = iter(range(1 << 20))
BLOCK = 4096


def namespace(mounted: Mounted, **settings: str) -> Path:
    name = f"prefixes-{next(NUMBERS)}"
    texts = {"prefix": "on", **settings}
    request(mounted.path, "ns_create", name=name, settings=texts, uid=0, gid=0)
    (mounted.path / name / ROOT.hex()).mkdir()
    return mounted.path / name


@pytest.fixture
def space(shared: Mounted) -> Iterator[Path]:
    made = namespace(shared)
    yield made
    request(shared.path, "ns_drop", name=made.name)


def chain(count: int, parent: bytes = ROOT, *, salt: int = 0) -> list[bytes]:
    return prefix.block_keys(parent, [1000 + salt, *range(count - 1)], 1)


def write(space: Path, keys: Iterable[bytes], parent: bytes = ROOT) -> None:
    for before, key in pairwise([parent, *keys]):
        path = space / prefix.path(before, key)
        unfinished = path.with_name(f"{path.name}.0x.tmp")
        unfinished.write_bytes(key * (BLOCK // len(key)))
        unfinished.rename(path)


def ask(space: Path, keys: list[bytes], parent: bytes = ROOT) -> matching.MatchAnswer:
    descriptor = os.open(space / ".match", os.O_RDWR)
    try:
        os.pwrite(descriptor, matching.pack_request(parent, keys, details=True), 0)
        return matching.unpack_answer(os.pread(descriptor, 1 << 20, 0))
    finally:
        os.close(descriptor)


def left(space: Path) -> set[str]:
    return set(os.listdir(space))


def listed(directory: int) -> list[str] | int:
    """The names in a directory, or the errno."""
    try:
        return os.listdir(directory)
    except OSError as error:
        return error.errno or 0


def named(*keys: bytes) -> set[str]:
    return {key.hex() for key in keys}


def blocks(space: Path) -> dict[str, str]:
    """The parent of each block that has a name."""
    found = {}
    for above in os.listdir(space):
        try:
            names = os.listdir(space / above)
        except FileNotFoundError:
            continue
        found.update(
            {one.key.hex(): above for name in names if (one := prefix.parse(name)) is not None}
        )
    return found


def test_directories_come_with_blocks(space: Path) -> None:
    os.chmod(space / ROOT.hex(), 0o2700)
    created, renamed, linked = chain(3)
    (space / prefix.path(ROOT, created)).write_bytes(b"x")
    assert (space / created.hex()).stat().st_mode & 0o7777 == 0o2700
    write(space, [renamed], created)
    path = space / prefix.path(renamed, linked, "0")
    path.with_name("aside").write_bytes(b"x")
    assert left(space) == named(ROOT, created, renamed)
    os.link(path.with_name("aside"), path)
    assert left(space) == named(ROOT, created, renamed, linked)
    os.setxattr(space, "user.kvfs.publish", b"close")
    (closed,) = chain(1, linked)
    with (space / prefix.path(linked, closed)).open("xb") as file:
        file.write(b"x")
        assert not (space / closed.hex()).exists()
    assert (space / closed.hex()).is_dir()
    assert space.stat().st_nlink == 2 + 5
    with refused(errno.ENOENT):
        write(space, chain(1), b"\1" * 16)


def test_directories_go_with_blocks(space: Path) -> None:
    keys = chain(5)
    other = chain(2, keys[1], salt=1)
    write(space, keys)
    write(space, other, keys[1])
    (space / prefix.path(keys[3], keys[4])).unlink()
    assert left(space) == named(ROOT, *keys[:4], *other)
    inside = os.open(space / keys[2].hex(), os.O_RDONLY)
    reader = (space / prefix.path(keys[2], keys[3])).open("rb")
    (space / prefix.path(keys[1], keys[2])).unlink()
    wait_for(lambda: left(space) == named(ROOT, *keys[:2], *other), "what follows goes")
    assert reader.read() == keys[3] * (BLOCK // 16)
    reader.close()
    assert listed(inside) in ([], errno.ESTALE)
    os.close(inside)
    (space / prefix.path(ROOT, keys[0])).rename(space / "aside")
    wait_for(lambda: left(space) == {*named(ROOT), "aside"}, "what follows goes")
    (space / ROOT.hex()).rmdir()
    assert left(space) == {"aside"}


def test_blocks_that_are_followed_stay(shared: Mounted) -> None:
    for policy in ("adaptive", "lru", "fifo", "s3fifo"):
        space = namespace(shared, quota_objects="8", eviction=policy)
        keys = chain(12)
        with refused(errno.EDQUOT):
            write(space, keys)
        assert ask(space, keys).blocks == 8
        other = chain(5, salt=1)
        write(space, other)
        assert ask(space, other).blocks == 5
        assert ask(space, keys).blocks >= 2
        assert left(space) >= named(ROOT, *other, *keys[:2])
        assert set(blocks(space).values()) <= {ROOT.hex(), *blocks(space)}
        request(shared.path, "ns_drop", name=space.name)


def test_hard_quota_is_kept_once_a_block_may_go(shared: Mounted) -> None:
    """The last block stays beyond the quota while its directory has a file that is written."""
    space, keys = namespace(shared), chain(6)
    write(space, keys[:5])
    unfinished = space / f"{prefix.path(keys[4], keys[5])}.0x.tmp"
    with unfinished.open("wb"):
        os.setxattr(space, "user.kvfs.quota_hard", str(4 * BLOCK).encode())
        assert len(blocks(space)) == 6
        unfinished.unlink()
    wait_for(lambda: set(blocks(space)) == named(*keys[:4]), "the last block goes", seconds=20)
    request(shared.path, "ns_drop", name=space.name)


def test_blocks_are_lent(shared: Mounted) -> None:
    in_ram = "ram" in shared.status()["tiers"]
    space, keys = namespace(shared, media="ram" if in_ram else "all"), chain(3)
    write(space, keys)
    wait_for(
        lambda: ask(space, keys).blocks == 3 and not shared.status()["writers"], "all is there"
    )
    before = shared.counter("opens_lent")
    client = Borrower(space, offer=False)
    if not in_ram:
        with refused(errno.EOPNOTSUPP):
            client.offer()
        client.close()
        request(shared.path, "ns_drop", name=space.name)
        return
    client.offer()
    lent, leases = client.borrow(ROOT, keys, BLOCK)
    assert len(lent) == 3
    assert shared.counter("opens_lent") - before == len(lent)
    for descriptor, key in zip(lent, keys, strict=False):
        (space / prefix.path(ROOT, keys[0])).unlink(missing_ok=True)
        assert os.pread(descriptor, BLOCK + 1, 0) == key * (BLOCK // len(key))
        with refused(errno.EROFS):
            os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        os.close(descriptor)
    assert shared.status()["open_handles"] == len(leases)
    client.give_back(leases[:1])
    assert shared.status()["open_handles"] == len(leases[1:])
    client.close()
    wait_for(lambda: not shared.status()["open_handles"], "the others have ended with it")
    request(shared.path, "ns_drop", name=space.name)


def test_blocks_are_made(shared: Mounted) -> None:
    status = shared.status()["tiers"]
    space, keys = namespace(shared), chain(3)
    paths = [space / prefix.path(above, key) for above, key in pairwise([ROOT, *keys])]
    if "ram" not in status or "s3" in status:
        client = Borrower(space, offer="ram" in status)
        if "ram" in status:
            assert client.make(ROOT, keys, BLOCK) == ([], [])
        client.close()
        request(shared.path, "ns_drop", name=space.name)
        return
    client = Borrower(space)
    made, leases = client.make(ROOT, keys, BLOCK)
    assert len(made) == 3
    assert all(path.stat().st_size == 0 for path in paths)
    for descriptor, key in zip(made, keys, strict=True):
        os.pwrite(descriptor, key * (BLOCK // len(key)), 0)
    assert ask(space, keys).blocks == 0
    os.close(made[0])
    client.done(leases[:2])
    assert shared.status()["writers"] == 2, "the second is open"
    os.close(made[1])
    wait_for(lambda: shared.status()["writers"] == 1, "it is closed")
    assert ask(space, keys).blocks == 2
    assert client.make(ROOT, keys, BLOCK) == ([], [])
    [large], _ = client.make(keys[2], chain(1, keys[2]), BLOCK)
    shared.expect_log("is cut off: it was lent to be 4096 bytes")
    os.pwrite(large, b"x", BLOCK)
    wait_for(lambda: not list((space / keys[2].hex()).glob("*")), "it is too large")
    os.close(large)
    client.close()
    os.close(made[2])
    wait_for(lambda: not paths[2].exists(), "nobody has said that it is done")
    for path, key in zip(paths[:2], keys, strict=False):
        assert path.read_bytes() == key * (BLOCK // len(key))


def test_match(space: Path) -> None:
    keys = chain(9)
    write(space, keys[:6])
    assert ".match" not in os.listdir(space)
    answer = ask(space, keys)
    assert (answer.blocks, sum(answer[1:4])) == (6, 6 * BLOCK)
    assert answer.sizes == (BLOCK,) * 6
    with (space / prefix.path(keys[5], keys[6])).open("xb") as file:
        file.write(b"x")
        assert ask(space, keys).blocks == 6
    assert ask(space, keys).blocks == 7
    (space / prefix.path(keys[1], keys[2])).unlink()
    assert ask(space, keys).blocks == 2

    first, second = (os.open(space / ".match", os.O_RDWR) for _ in range(2))
    for descriptor, some in ((first, keys[:1]), (second, keys[5:])):
        os.pwrite(descriptor, matching.pack_request(ROOT, some), 0)
    assert matching.unpack_answer(os.pread(first, 4096, 0)).blocks == 1
    assert matching.unpack_answer(os.pread(second, 4096, 0)).blocks == 0
    many = matching.pack_request(ROOT, keys[:1] + [bytes(16)] * 65535)
    assert os.pwrite(first, many, 0) == len(many), "more than the kernel sends at once"
    assert matching.unpack_answer(os.pread(first, 4096, 0)).blocks == 1
    with refused(errno.EINVAL):
        os.pwrite(first, b"what is there?", 0)
    with refused(errno.EINVAL):
        os.pwrite(first, matching.pack_request(ROOT, keys), 1)
    with refused(errno.ESTALE):
        os.pread(first, 4096, 0)
    os.close(first)
    os.close(second)
    hidden = space / ".match"
    (space / "aside").touch()
    (space / "below").mkdir()
    (space / "below" / ".match").touch()
    for change in (
        hidden.unlink,
        partial((space / "below" / ".match").rename, hidden),
        partial(hidden.rename, space / "other"),
        partial((space / "aside").rename, hidden),
        partial(os.truncate, hidden, 0),
        partial(os.chmod, hidden, 0o600),
    ):
        with refused(errno.EPERM):
            change()
    with refused(errno.EEXIST):
        hidden.mkdir()
    assert as_nobody(space, lambda: os.close(os.open(".match", os.O_RDWR))) == 0
    os.chmod(space, 0o700)
    assert as_nobody(space.parent, lambda: os.open(f"{space.name}/.match", os.O_RDWR)) == (
        errno.EACCES
    )


def test_told_in_time(shared: Mounted, space: Path) -> None:
    shared.allow_log("user.kvfs.prefix is refused: setting prefix")
    with refused(errno.EINVAL):
        os.setxattr(space, "user.kvfs.prefix", b"off")
    assert os.getxattr(space, "user.kvfs.prefix") == b"on"
    settings = {"prefix": "off", "version": "2"}
    request(shared.path, "ns_set", name=space.name, settings=settings)
    assert not (space / ".match").exists()
    os.setxattr(space, "user.kvfs.prefix", b"on")
    assert (space / ".match").exists()
