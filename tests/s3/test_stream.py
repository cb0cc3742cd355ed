"""A real mount with a real bucket: programs read large objects while they download."""

import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, descendants, wait_for
from tests.s3.test_mounted import all_uploaded, attribute, keys, s3_of
from tests.s3.valve import Valve

MIB = 1 << 20
CHUNK = 8 * MIB
SEED = 7
DAMAGED = 3 * CHUNK  # where the chunk begins that a test may damage
MARK = b"0123456789abcdef"
_dice = random.Random(SEED)
LARGE = _dice.randbytes(DAMAGED) + MARK * (CHUNK // 16) + _dice.randbytes(2 * CHUNK + 12345)
LAST = len(LARGE) // CHUNK * CHUNK

RAM = "ram=256M,nvme={tmp}/nvme,nvme_size=256M"
NVME = "ram=64M,nvme={tmp}/nvme,nvme_size=256M"

# In a process of its own: one that waits for a page holds Python's lock, and the valve needs that.
MAPPER = """
import mmap, os, sys
path, wanted, flags = sys.argv[1:]
wanted = open(wanted, "rb").read()
with open(path, "rb", buffering=0) as file:
    mapped = mmap.mmap(file.fileno(), 0, int(flags), mmap.PROT_READ)
print("begins", "right" if mapped[:1 << 20] == wanted[:1 << 20] else "wrong", flush=True)
input()
print("all", "right" if mapped[:] == wanted else "wrong", flush=True)
"""

Spilled = Callable[..., tuple[Mounted, Path]]


@pytest.fixture
def valve(s3: Server) -> Iterator[Valve]:
    found = Valve(s3.endpoint)
    yield found
    found.close()


@pytest.fixture
def spilled(valve: Valve, bucket: str, mount: Mount) -> Spilled:
    """`spilled(options)` mounts, with one large object that only the bucket has."""

    def make(options: str = RAM, content: bytes = LARGE) -> tuple[Mounted, Path]:
        store = (
            f"s3=s3://{bucket}/p,s3_endpoint={valve.endpoint},s3_region=us-east-1,s3_delay=0.1,"
            "s3_stream=16M"
        )
        kv = mount(f"{RAM},{store}")
        space = kv.path / "space"
        space.mkdir()
        os.setxattr(space, "user.kvfs.media", b"ram+s3")
        path = space / "large"
        path.write_bytes(content)
        all_uploaded(kv)
        kv.remount(f"{options},{store}".replace("{tmp}", str(kv.path.parent)))
        os.setxattr(space, "user.kvfs.media", b"ram+nvme+s3")
        assert attribute(path, "tier") == "s3"
        return kv, path

    return make


def whole(fd: int) -> bytes:
    found = bytearray()
    while piece := os.pread(fd, MIB, len(found)):
        found += piece
    return bytes(found)


def ended(kv: Mounted) -> None:
    wait_for(lambda: not s3_of(kv)["streaming"], "all of it is here")


@pytest.mark.parametrize("options", [RAM, NVME, f"{RAM},passthrough=off"])
def test_object_is_read_while_it_downloads(spilled: Spilled, valve: Valve, options: str) -> None:
    kv, path = spilled(options)
    valve.let(lambda start: start < CHUNK)
    with path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 3 * MIB) == LARGE[3 * MIB : 4 * MIB]
        assert s3_of(kv)["streaming"] == 1
        assert s3_of(kv)["downloads"] == 0
        assert attribute(path, "tier") == "s3"
        valve.open()
        assert whole(file.fileno()) == LARGE
        ended(kv)
        assert path.read_bytes() == LARGE, "of one that is open still"
        assert os.pread(file.fileno(), 100, LAST - 50) == LARGE[LAST - 50 : LAST + 50]
        assert os.pread(file.fileno(), 100, len(LARGE)) == b""
    tier = "nvme" if options is NVME else "ram"
    assert attribute(path, "tier") == f"{tier}+s3"
    wait_for(lambda: not kv.status()["open_handles"], "the next open is one of its own")
    before = kv.counter("opens_passthrough")
    assert path.read_bytes() == LARGE
    assert kv.counter("opens_passthrough") - before == kv.status()["passthrough"]["on"]
    assert s3_of(kv)["downloads"] == 1
    kv.idle()


def test_another_node_reads_it_while_it_comes(
    valve: Valve, s3: Server, bucket: str, mount: Mount
) -> None:
    # The chunks are as the node that has uploaded it says.
    store = f"s3=s3://{bucket}/p,s3_region=us-east-1,s3_delay=0.1,s3_stream=16M"
    one = mount(f"{RAM},{store},s3_endpoint={s3.endpoint}".replace("{tmp}/", "{tmp}/one-"), "one")
    other = mount(f"{NVME},{store},s3_endpoint={valve.endpoint}", "other")
    (one.path / "d").mkdir()
    (one.path / "d" / "large").write_bytes(LARGE)
    all_uploaded(one)
    path = other.path / "d" / "large"
    wait_for(path.exists, "it is found")
    valve.let(lambda start: start < CHUNK)
    with path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 3 * MIB) == LARGE[3 * MIB : 4 * MIB]
        assert (s3_of(other)["streaming"], s3_of(other)["downloads"]) == (1, 0)
        valve.open()
        assert whole(file.fileno()) == LARGE
        ended(other)
    assert path.read_bytes() == LARGE
    # The second open may have promoted it by now.
    assert attribute(path, "tier") in {"nvme+s3", "ram+nvme+s3"}
    assert s3_of(other)["downloads"] == 1


def asleep(thread: int) -> bool:
    """Whether the thread waits for an answer of the daemon."""
    return Path(f"/proc/self/task/{thread}/wchan").read_text() == "request_wait_answer"


def test_chunk_of_a_waiting_reader_comes_next(spilled: Spilled, valve: Valve) -> None:
    kv, path = spilled()
    valve.asked.clear()
    valve.let(lambda _: False)
    found: list[bytes] = []
    with path.open("rb", buffering=0) as file:
        wait_for(lambda: len(valve.asked) == 4, "as many requests as run at a time")
        assert LAST not in valve.asked
        reader = threading.Thread(
            target=lambda: found.append(os.pread(file.fileno(), MIB, len(LARGE) - 999))
        )
        reader.start()
        wait_for(lambda: asleep(reader.native_id or 0), "it waits for its bytes")
        kv.status()
        kv.status()  # by now the daemon has seen the read
        valve.let(lambda start: start == 0)
        wait_for(lambda: len(valve.asked) == 5, "the next one is asked for")
        assert valve.asked[4] == LAST
        valve.let(lambda start: start in {0, LAST})
        reader.join()
        assert found == [LARGE[-999:]]
        assert s3_of(kv)["streaming"] == 1
        valve.open()
        assert whole(file.fileno()) == LARGE


def test_many_readers_have_it_fetched_once(spilled: Spilled, valve: Valve) -> None:
    kv, path = spilled()
    valve.asked.clear()
    found: list[bytes] = []
    readers = [threading.Thread(target=lambda: found.append(path.read_bytes())) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found == [LARGE] * 4
    ended(kv)
    assert len(valve.asked) == len(set(valve.asked))
    assert set(range(0, len(LARGE), CHUNK)) <= set(valve.asked)
    assert s3_of(kv)["downloads"] == 1


@pytest.mark.parametrize("options", [RAM, NVME])
def test_streamed_reads_continue_after_a_takeover(
    spilled: Spilled, valve: Valve, options: str
) -> None:
    kv, path = spilled(options)
    valve.let(lambda start: start < CHUNK)
    with path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 0) == LARGE[:MIB]
        kv.kill_daemon()
        with path.open("rb", buffering=0) as other:
            assert os.pread(other.fileno(), MIB, MIB) == LARGE[MIB : 2 * MIB]
            assert s3_of(kv)["streaming"] == 1
            valve.open()
            assert whole(file.fileno()) == LARGE
            assert whole(other.fileno()) == LARGE
        ended(kv)
        kv.kill_daemon()
        assert whole(file.fileno()) == LARGE
    assert path.read_bytes() == LARGE
    kv.check_gauges()
    kv.check_accounts()


def at_work(kv: Mounted) -> list[int]:
    """The movers with a download: they have a file without a name."""
    return [
        pid
        for pid in descendants(kv.pid)
        if any("/#" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    ]


def test_a_mover_that_dies_begins_anew(spilled: Spilled, valve: Valve) -> None:
    kv, path = spilled()
    kv.expect_log("a mover died over")
    valve.let(lambda start: start < CHUNK)
    with path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 0) == LARGE[:MIB]
        valve.asked.clear()
        (mover,) = at_work(kv)
        os.kill(mover, signal.SIGKILL)
        wait_for(lambda: 0 in valve.asked, "it is fetched anew")
        assert os.pread(file.fileno(), MIB, MIB) == LARGE[MIB : 2 * MIB]
        valve.open()
        assert whole(file.fileno()) == LARGE
        ended(kv)
    assert path.read_bytes() == LARGE


def test_object_unlinked_during_its_download_is_read_to_its_end(
    spilled: Spilled, valve: Valve, s3: Server, bucket: str
) -> None:
    kv, path = spilled()
    valve.let(lambda start: start < CHUNK)
    with path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 0) == LARGE[:MIB]
        path.unlink()
        valve.open()
        assert whole(file.fileno()) == LARGE
        ended(kv)
        assert whole(file.fileno()) == LARGE
    wait_for(lambda: not keys(s3, bucket), "it is deleted")
    kv.check_gauges()
    kv.check_accounts()


def test_unlinked_download_of_a_dead_daemon_is_an_error(spilled: Spilled, valve: Valve) -> None:
    kv, path = spilled()
    kv.expect_log("a read gets EIO: its bytes have not all come, and are gone")
    valve.let(lambda start: start < CHUNK)
    with path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 0) == LARGE[:MIB]
        path.unlink()
        kv.kill_daemon()
        with pytest.raises(OSError, match="Input/output") as raised:
            os.pread(file.fileno(), MIB, 0)
        assert raised.value.errno == errno.EIO
    valve.open()
    kv.check_gauges()


def test_a_damaged_chunk_is_given_to_nobody(spilled: Spilled, valve: Valve) -> None:
    kv, path = spilled()
    kv.expect_log("a read gets EIO: .* has another xxh3-64")
    kv.allow_log("is lost|once more|stays in the bucket")
    valve.damage = (MARK, MARK[::-1])
    with path.open("rb", buffering=0) as file:
        with pytest.raises(OSError, match="Input/output"):
            os.pread(file.fileno(), MIB, DAMAGED)
        with pytest.raises(OSError, match="Input/output"):
            os.pread(file.fileno(), MIB, 0)
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    assert not path.exists()
    kv.check_gauges()
    kv.check_accounts()


def test_bytes_that_do_not_come_are_an_error(spilled: Spilled, valve: Valve) -> None:
    kv, path = spilled()
    kv.expect_log("a read gets EIO: .* not here within 1 s")
    valve.let(lambda start: start < CHUNK)
    with path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 0) == LARGE[:MIB]
        subprocess.run([*KVFS, "set", str(kv.path), "s3_wait=1"], check=True)
        with pytest.raises(OSError, match="Input/output"):
            os.pread(file.fileno(), MIB, LAST)
        valve.open()
        subprocess.run([*KVFS, "set", str(kv.path), "s3_wait=30"], check=True)
        assert whole(file.fileno()) == LARGE, "it was only late"


def test_a_reader_that_is_killed_ends(spilled: Spilled, valve: Valve) -> None:
    kv, path = spilled()
    valve.let(lambda start: start < CHUNK)
    code = (
        f"import os; fd = os.open({str(path)!r}, 0); print(1, flush=True); os.pread(fd, 9, {LAST})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        wchan = Path(f"/proc/{reader.pid}/wchan")
        wait_for(lambda: wchan.read_text() == "request_wait_answer", "it waits for its bytes")
        reader.send_signal(signal.SIGKILL)
        assert reader.wait(20) == -signal.SIGKILL, "s3_wait is 30"
    valve.open()
    ended(kv)
    assert path.read_bytes() == LARGE


@pytest.mark.parametrize("passthrough", ["auto", "off"])
@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_object_is_mapped_while_it_downloads(
    spilled: Spilled, valve: Valve, flags: int, passthrough: str
) -> None:
    kv, path = spilled(f"{RAM},passthrough={passthrough}")
    (kv.path.parent / "wanted").write_bytes(LARGE)
    command = [sys.executable, "-c", MAPPER, str(path), str(kv.path.parent / "wanted"), str(flags)]

    def told(mapper: "subprocess.Popen[str]", expected: str) -> None:
        assert mapper.stdout is not None
        assert mapper.stdout.readline().strip() == expected

    def go_on(mapper: "subprocess.Popen[str]") -> None:
        assert mapper.stdin is not None
        print(file=mapper.stdin, flush=True)

    valve.let(lambda start: start < CHUNK)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as mapper:
        told(mapper, "begins right")
        assert s3_of(kv)["streaming"] == 1
        valve.open()
        go_on(mapper)
        told(mapper, "all right")
        ended(kv)
        assert path.read_bytes() == LARGE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
            told(other, "begins right")
            go_on(other)
            told(other, "all right")
    wait_for(lambda: not kv.status()["open_handles"], "the next open is one of its own")
    before = kv.counter("opens_passthrough")
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as mapper:
        told(mapper, "begins right")
        go_on(mapper)
        told(mapper, "all right")
    assert kv.counter("opens_passthrough") - before == kv.status()["passthrough"]["on"]


def test_a_writer_waits_for_all_of_it(spilled: Spilled, valve: Valve) -> None:
    kv, path = spilled()
    valve.let(lambda start: start < CHUNK)
    with path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 0) == LARGE[:MIB]
        writer = threading.Thread(target=lambda: path.write_bytes(b"new"))
        writer.start()
        wait_for(lambda: asleep(writer.native_id or 0), "it waits")
        valve.open()
        writer.join()
        assert os.pread(file.fileno(), MIB, 0) == b"new"
    assert path.read_bytes() == b"new"
    all_uploaded(kv)
    kv.check_gauges()
    kv.check_accounts()


def test_an_unmount_does_not_wait_for_the_rest(spilled: Spilled, valve: Valve) -> None:
    kv, path = spilled()
    valve.let(lambda start: start < CHUNK)
    with path.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 0) == LARGE[:MIB]
    assert s3_of(kv)["streaming"] == 1
    kv.umount()
    valve.open()
    kv.mount()
    assert attribute(path, "tier") == "s3"
    assert path.read_bytes() == LARGE


def test_object_below_s3_stream_is_downloaded_before_its_open(spilled: Spilled) -> None:
    kv, path = spilled()
    subprocess.run([*KVFS, "set", str(kv.path), "s3_stream=1G"], check=True)
    assert path.read_bytes() == LARGE
    on = kv.status()["passthrough"]["on"]
    assert kv.counter("opens_passthrough" if on else "opens_served") > 0
    assert not on or kv.counter("opens_served") == 0
