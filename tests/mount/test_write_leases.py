"""Blocks that the mount makes, many at a time: other programs' view of them, and their end."""

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from kvfs import leasing, prefix
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.leases import Borrower
from tests.mount.test_read_leases import borrowing, contents, files_of, of
from tests.semantics.syscalls import as_nobody, refused
from tests.semantics.test_prefixes import BLOCK, ROOT, ask, chain, namespace, write


@pytest.fixture
def kv(emptied: Mount) -> Mounted:
    return emptied("ram=256M,allow_other")


@pytest.fixture(params=["passthrough=auto", "passthrough=off"])
def either(request: pytest.FixtureRequest, emptied: Mount) -> Mounted:
    return emptied(f"ram=256M,{request.param}")


def fill(descriptors: list[int], keys: list[bytes]) -> None:
    """Write the bytes of each block, and close the descriptors."""
    for descriptor, content in zip(descriptors, of(keys), strict=True):
        assert os.pwrite(descriptor, content, 0) == BLOCK
        os.close(descriptor)


def cached(space: Path, keys: list[bytes]) -> int:
    """The number of cached blocks, as the mount answers."""
    return ask(space, keys).blocks


def in_order(kv: Mounted) -> None:
    """Check that the daemon's accounts agree with its files, and that it holds nothing."""
    kv.idle()
    assert kv.status()["writers"] == kv.status()["open_handles"] == 0


def test_made_written_and_sealed(either: Mounted) -> None:
    space, keys = namespace(either), chain(5)
    with borrowing(space) as client:
        made, leases = client.make(ROOT, keys, BLOCK)
        assert len(made) == 5
        assert [path.stat().st_size for path in files_of(space, keys)] == [0] * 5
        assert client.borrow(ROOT, keys, BLOCK) == ([], []), "they are being written"
        assert cached(space, keys) == client_cached(space, keys) == 0
        fill(made[:2], keys[:2])
        client.done(leases[:2])
        assert cached(space, keys) == 2
        assert either.status()["writers"] == 3
        fill(made[2:], keys[2:])
        client.done(leases[2:])
        assert cached(space, keys) == 5
        lent, more = client.borrow(ROOT, keys, BLOCK)
        assert contents(lent) == of(keys)
        client.give_back(more)
        assert [path.read_bytes() for path in files_of(space, keys)] == of(keys)
    in_order(either)
    assert either.counter("sealed") == 5


def test_made_block_is_opened_fast(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(3)
    with borrowing(space) as client:
        made, leases = client.make(ROOT, keys, BLOCK)
        fill(made, keys)
        client.done(leases)
    wait_for(lambda: kv.status()["fast_open"]["objects"] == 3, "opens of them are fast")
    before = kv.counter("opens_fast")
    assert [path.read_bytes() for path in files_of(space, keys)] == of(keys)
    assert kv.counter("opens_fast") - before == 3
    in_order(kv)


def client_cached(space: Path, keys: list[bytes]) -> int:
    """The number of blocks with the size in their names."""
    sizes = [path.stat().st_size for path in files_of(space, keys)]
    return next((at for at, size in enumerate(sizes) if size != BLOCK), len(sizes))


def test_a_reader_sees_it_grow(either: Mounted) -> None:
    """The kernel's cached bytes of a file are never older than the bytes written past the cache."""
    space, keys = namespace(either), chain(1)
    [path] = files_of(space, keys)
    [content] = of(keys)
    with borrowing(space) as client:
        [made], leases = client.make(ROOT, keys, BLOCK)
        with path.open("rb", buffering=0) as reader:
            assert os.pread(reader.fileno(), BLOCK, 0) == b""
            for end in (1, 1000, 1001, BLOCK):
                os.pwrite(made, content[:end], 0)
                assert os.pread(reader.fileno(), BLOCK, 0) == content[:end]
                assert path.stat().st_size == end
                assert path.read_bytes() == content[:end]
            os.close(made)
            client.done(leases)
        assert path.read_bytes() == content
    in_order(either)


def test_made_blocks_without_all_bytes_are_removed(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(6)
    with borrowing(space) as client:
        made, leases = client.make(ROOT, keys, BLOCK)
        fill(made[:2], keys[:2])
        client.done(leases[:2])
        os.pwrite(made[2], b"half", 0)
        fill(made[3:], keys[3:])
        os.close(made[2])
        client.done(leases[3:])
        assert cached(space, keys) == 2
        with refused(errno.ESTALE):
            client.done(leases[2:3])
        with refused(errno.ESTALE):
            client.done(leases[2:3])
        assert cached(space, keys) == 2
        wait_for(
            lambda: not any(path.exists() for path in files_of(space, keys)[2:]),
            "what followed it has gone as well",
        )
        again, more = client.make(keys[1], keys[2:], BLOCK)
        for descriptor in again:
            os.close(descriptor)
        client.give_back([*more, *more, 1])
        assert cached(space, keys) == 2
    in_order(kv)


def test_making_ends_before_an_existing_block(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(4)
    write(space, keys[:1])
    with borrowing(space) as client:
        assert client.make(ROOT, keys, BLOCK) == ([], [])
        made, leases = client.make(keys[0], keys[1:3], BLOCK)
        with borrowing(space) as other:
            assert other.make(keys[0], keys[1:], BLOCK) == ([], [])
            more, others = other.make(keys[2], keys[3:], BLOCK)
            with refused(errno.ESTALE):
                client.done(others)  # of another descriptor
            fill(more, keys[3:])
            other.done(others)
        fill(made, keys[1:3])
        client.done(leases)
        assert cached(space, keys) == 4
        assert client.make(keys[3], [], BLOCK) == ([], [])
        assert client.make(bytes(16), keys, BLOCK) == ([], []), "there is no such directory"
    in_order(kv)


def test_made_blocks_have_the_owner_and_mode_of_the_client(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(4)
    root = space / ROOT.hex()

    def made() -> int:
        def make() -> None:
            client = Borrower(".")
            found, leases = client.make(ROOT, keys, BLOCK, mode=0o640)
            fill(found, keys[: len(found)])
            client.done(leases)
            raise OSError(200 + len(found), "to be returned")

        return as_nobody(space, make) - 200

    assert made() == 0, "it may not write there"
    root.chmod(0o703)
    assert made() == 4
    for path in files_of(space, keys):
        found = path.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, 65534, 0o640)
        assert path.read_bytes() in of(keys)
    space.chmod(0o700)
    assert as_nobody(Path("/"), lambda: os.open(space / ".match", os.O_RDWR)) == errno.EACCES
    in_order(kv)


def test_making_needs_room_in_ram_for_each_block(mount: Mount) -> None:
    """kvfs makes room for one block at a time, and evicts as for any create: when bytes come."""
    kv = mount("ram=64M")
    size, space, keys = 8 << 20, namespace(kv, eviction="lru"), chain(12)
    with borrowing(space) as client:
        made, leases = client.make(ROOT, keys, size)
        assert 4 <= len(made) < 8
        for descriptor in made:
            os.posix_fallocate(descriptor, 0, size)
            os.close(descriptor)
        client.done(leases)
        other = chain(12, salt=1)
        more, others = client.make(ROOT, other, size)
        assert len(more) >= len(made) // 2
        assert client.make(other[len(more) - 1], other[len(more) :], size) == ([], [])
        assert client.make(ROOT, chain(1, salt=2), 1 << 62) == ([], [])
        for descriptor in more:
            os.close(descriptor)
        client.give_back(others)
    in_order(kv)
    assert kv.status()["counters"].get("dropped_evicted", 0) <= 1


def test_a_quota(kv: Mounted) -> None:
    space, keys = namespace(kv, quota_objects="4"), chain(8)
    with borrowing(space) as client:
        made, leases = client.make(ROOT, keys, BLOCK)
        assert len(made) == 4
        fill(made, keys[:4])
        client.done(leases)
        assert cached(space, keys) == 4
    in_order(kv)


@pytest.mark.parametrize("settings", [{"publish": "close"}, {"media": "nvme"}])
def test_namespace_without_ram_or_with_a_limit_makes_no_blocks(
    mount: Mount, settings: dict[str, str]
) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=128M")
    space, keys = namespace(kv, **settings), chain(2)
    with borrowing(space) as client:
        assert client.make(ROOT, keys, BLOCK) == ([], [])
    free = namespace(kv)
    with borrowing(free) as client:
        made, leases = client.make(ROOT, keys, BLOCK)
        assert len(made) == 2, "the first as well: its size is known"
        fill(made, keys)
        client.done(leases)
        request(kv.path, "ns_set", name=free.name, settings={"write_iops": "1000"})
        assert client.make(keys[1], chain(1, keys[1]), BLOCK) == ([], []), "it may have to wait"
    in_order(kv)


CODE = """
import sys
from tests.leases import Borrower
keys = [bytes.fromhex(key) for key in sys.argv[3:]]
client = Borrower(sys.argv[1])
print(len(client.make(bytes.fromhex(sys.argv[2]), keys, 4096)[0]), flush=True)
sys.stdin.read()
"""


def test_made_blocks_of_a_dead_process_are_removed(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(4)
    with subprocess.Popen(
        [sys.executable, "-c", CODE, str(space), *[key.hex() for key in (ROOT, *keys)]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "4\n"
        assert kv.status()["writers"] == 4
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: kv.status()["writers"] == 0, "its leases have ended")
    wait_for(lambda: not any(path.exists() for path in files_of(space, keys)), "they have gone")
    in_order(kv)


def test_descriptor_after_done_keeps_the_block_unsealed(kv: Mounted) -> None:
    """A descriptor or a mapping stays after DONE: kvfs does nothing to the block before it ends."""
    space, keys = namespace(kv), chain(2)
    with borrowing(space) as client:
        made, leases = client.make(ROOT, keys, BLOCK)
        os.pwrite(made[0], bytes(BLOCK), 0)
        os.pwrite(made[1], bytes(BLOCK), 0)
        mapped = mmap.mmap(made[1], BLOCK)
        os.close(made[1])
        client.done(leases)
        assert kv.status()["writers"] == 2
        os.pwrite(made[0], of(keys)[0], 0)
        mapped[:] = of(keys)[1]
        assert [path.read_bytes() for path in files_of(space, keys)] == of(keys)
        os.close(made[0])
        mapped.close()
        wait_for(lambda: kv.status()["writers"] == 0, "nobody can write any more")
        lent, _ = client.borrow(ROOT, keys, BLOCK)
        assert contents(lent) == of(keys)
    in_order(kv)


def test_descriptor_after_done_waits_for_the_readers(kv: Mounted) -> None:
    """With readers the kernel does not tell of writers, so kvfs waits for the readers."""
    space, keys = namespace(kv), chain(1)
    [path] = files_of(space, keys)
    with borrowing(space) as client:
        [made], leases = client.make(ROOT, keys, BLOCK)
        os.pwrite(made, bytes(BLOCK), 0)
        with path.open("rb") as reader:
            client.done(leases)
            assert client.borrow(ROOT, keys, BLOCK) == ([], [])
            assert kv.status()["writers"] == 1
            os.pwrite(made, of(keys)[0], 0)
            assert reader.read() == of(keys)[0]
        assert kv.status()["writers"] == 1
        os.close(made)
        wait_for(lambda: kv.status()["writers"] == 0, "nobody can write any more")
        lent, _ = client.borrow(ROOT, keys, BLOCK)
        assert contents(lent) == of(keys)
    in_order(kv)


def test_done_of_a_read_lease_ends_it(kv: Mounted) -> None:
    """DONE ends the lease, as CLOSE does, and does not count the block as sealed."""
    space, keys = namespace(kv), chain(3)
    write(space, keys)
    kv.idle()
    with borrowing(space) as client:
        lent, leases = client.borrow(ROOT, keys, BLOCK)
        assert contents(lent) == of(keys)
        with refused(errno.ESTALE):
            client.done(leases)
        assert kv.status()["open_handles"] == 0
        assert cached(space, keys) == 3
    in_order(kv)


def test_blocks_of_unread_answers_go_with_the_socket(kv: Mounted) -> None:
    """The socket holds their descriptors; their blocks go when the socket does."""
    space, keys = namespace(kv), chain(64)
    with borrowing(space) as client:
        client.say(
            leasing.pack_request(leasing.LeaseRequest(ROOT, keys, "", BLOCK, mode=0o644)),
        )
        assert kv.status()["writers"] == 64
    wait_for(lambda: kv.status()["writers"] == 0, "they have ended")
    in_order(kv)


@pytest.mark.parametrize("how", ["killed", "upgraded"])
def test_another_daemon(mount: Mount, how: str) -> None:
    """The next daemon knows no leases: a file of full size is a block when its writer closes it."""
    kv = mount("ram=256M,allow_other")
    space, keys = namespace(kv), chain(4)
    with borrowing(space) as client:
        made, leases = client.make(ROOT, keys, BLOCK)
        fill(made[:1], keys[:1])
        before = kv.pid
        if how == "killed":
            kv.kill_daemon()
        else:
            command = [sys.executable, "-m", "kvfs", "upgrade", str(kv.path)]
            subprocess.run(command, check=True, capture_output=True)
        wait_for(lambda: kv.pid != before, "another daemon serves")
        with refused(errno.ESTALE):
            client.done(leases)
        os.pwrite(made[1], of(keys)[1], 0)
        os.pwrite(made[2], b"half", 0)
        for descriptor in made[1:]:
            os.close(descriptor)
        wait_for(lambda: kv.status()["writers"] == 0, "all are sealed")
        assert client_cached(space, keys) == 2
        assert [path.read_bytes() for path in files_of(space, keys)[:2]] == of(keys[:2])
        with refused(errno.ESTALE):
            client.make(keys[3], chain(1, keys[3]), BLOCK)
        client.offer()
        more, others = client.make(keys[3], chain(1, keys[3]), BLOCK)
        os.close(more[0])
        client.give_back(others)
    in_order(kv)


def test_unlinked_and_replaced_meanwhile(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(3)
    paths = files_of(space, keys)
    with borrowing(space) as client:
        made, leases = client.make(ROOT, keys, BLOCK)
        paths[2].unlink()
        write(space, keys[1:2], keys[0])  # renamed over the one that is being written
        fill(made, keys)
        with refused(errno.ESTALE):
            client.done(leases)
        assert cached(space, keys) == 2
        assert [path.read_bytes() for path in paths[:2]] == of(keys[:2])
        assert not paths[2].exists()
    in_order(kv)


def test_a_namespace_that_is_dropped(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(4)
    with borrowing(space) as client:
        made, leases = client.make(ROOT, keys, BLOCK)
        request(kv.path, "ns_drop", name=space.name)
        with refused(errno.ESTALE):
            client.make(ROOT, keys, BLOCK)
        fill(made, keys)
        client.give_back(leases)
    wait_for(lambda: not kv.status()["objects"], "all of it has gone")
    in_order(kv)


def test_names_are_those_of_the_scheme(mount: Mount) -> None:
    kv = mount("ram=256M")
    space, keys = namespace(kv), chain(3)
    with borrowing(space) as client:
        for shard in ("tp2-0", "tp2-1"):
            made, leases = client.make(ROOT, keys, BLOCK, shard)
            fill(made, keys)
            client.done(leases)
    found = sorted(path.relative_to(space) for path in space.glob("*/*"))
    wanted = [
        Path(prefix.path(above, key, shard))
        for above, key in pairwise([ROOT, *keys])
        for shard in ("tp2-0", "tp2-1")
    ]
    assert found == sorted(wanted)
    in_order(kv)
