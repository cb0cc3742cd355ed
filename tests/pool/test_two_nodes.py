"""Two mounts of one pool: an object that one of them sealed is read at the other."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from kvfs import acl, matching, prefix, runtime
from kvfs.control import request
from kvfs.pool import nginx
from kvfs.pool.nginx import Nginx
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.pool.authority import authority
from tests.pool.servers import free_port, server, start
from tests.semantics.test_prefixes import BLOCK, ROOT, ask, chain
from tests.semantics.test_prefixes import write as write_blocks

MIB = 1 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[str]:
    """The options of a pool with a new index; PORT is each node's own."""
    uid = nginx.account().pw_uid
    for folder in (tmp_path, *tmp_path.parents):  # pytest's are private
        if not acl.passes(folder, uid):
            acl.allow(folder, uid, acl.PASS)
    port = free_port()
    with server(tmp_path / "redis", port):
        yield f"ram=64M,nvme={{tmp}}/NAME-nvme,nvme_size=256M,pool=redis://127.0.0.1:{port}/kv"


def node(mount: Mount, pool: str, name: str) -> Mounted:
    options = f"{pool.replace('NAME', name)},pool_address=127.0.0.1:{free_port()}"
    return mount(options, name)


def announced(kv: Mounted) -> int:
    found: int = kv.status()["pool"]["objects"]
    return found


def write(kv: Mounted, name: str, data: bytes) -> None:
    before = announced(kv)
    (kv.path / name).write_bytes(data)
    wait_for(lambda: announced(kv) > before, "it is announced")


def test_object_of_one_node_is_read_at_the_other(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    data = os.urandom(8 * MIB)
    write(a, "block", data)
    assert (b.path / "block").stat().st_size == len(data)
    assert (b.path / "block").read_bytes() == data
    assert b.status()["pool"]["counters"]["fetched"] == 1
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    a.umount()
    assert (b.path / "block").read_bytes() == data


def read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def absent(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    return False


def test_nodes_of_the_pool_are_shown(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)

    def shown() -> str:
        return subprocess.run(
            [*KVFS, "pool", b.path], check=True, capture_output=True, text=True
        ).stdout

    wait_for(lambda: re.search(r"/a +127.0.0.1:\d+ +live +1 +1.0 MiB", shown()), "a has it")
    assert re.search(r"/b \(this\) +127.0.0.1:\d+ +live +0 +0 B", shown())
    a.umount("--now")
    wait_for(lambda: "/a " not in shown(), "it has left")
    done = subprocess.run([*KVFS, "pool", "--json", b.path], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert [one["mountpoint"] for one in found["nodes"]] == [str(b.path)]


def test_names_of_directories_and_namespaces(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    (a.path / "one" / "two").mkdir(parents=True)
    write(a, "one/two/block", b"x" * 100)
    assert (b.path / "one" / "two" / "block").read_bytes() == b"x" * 100
    assert absent(b.path / "one" / "three")


def test_listing_shows_objects_of_both_nodes(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    (a.path / "one").mkdir()
    names = ["100 %", "\u00fc", *map(str, range(150))]
    for name in names:
        (a.path / "one" / name).write_bytes(name.encode())
    (b.path / "mine").write_bytes(b"")
    wait_for(lambda: announced(a) == len(names), "they are announced")
    assert sorted(os.listdir(b.path)) == ["mine", "one"]
    assert sorted(os.listdir(b.path / "one")) == sorted(names)
    assert all(path.read_bytes() == path.name.encode() for path in (b.path / "one").iterdir())
    a.umount("--now")


def test_unlinked_object_is_gone_everywhere(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    assert (b.path / "block").read_bytes() == b"x"
    (a.path / "block").unlink()
    wait_for(lambda: absent(b.path / "block"), "the other node lets its copy go")


def test_rewritten_object_has_its_new_bytes(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    assert (b.path / "block").read_bytes() == b"x"
    (a.path / "block").write_bytes(b"new")
    wait_for(lambda: a.status()["pool"]["counters"]["unlinked"] > 0, "the old one is unlinked")
    wait_for(lambda: announced(a) == 1, "the new one is announced")
    wait_for(lambda: read(b.path / "block") == b"new", "the other node gets the new bytes")


def test_renamed_directory_takes_its_objects_along(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    (a.path / "old" / "below").mkdir(parents=True)
    write(a, "old/below/block", b"x")
    assert not absent(b.path / "old")
    (a.path / "old").rename(a.path / "new")
    wait_for(lambda: read(b.path / "new" / "below" / "block") == b"x", "it has its new name")
    assert absent(b.path / "old" / "below" / "block")


def test_renamed_object_has_its_new_name(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    (a.path / "block").rename(a.path / "other")
    wait_for(lambda: read(b.path / "other") == b"x", "it has its new name")
    assert absent(b.path / "block")


def test_evicted_object_stays_with_the_other(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    assert (b.path / "block").read_bytes() == b"x" * MIB
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    subprocess.run([*KVFS, "evict", "--drop", a.path / "block"], check=True, capture_output=True)
    wait_for(lambda: announced(a) == 0, "it is withdrawn")
    assert (a.path / "block").read_bytes() == b"x" * MIB
    assert a.status()["pool"]["counters"]["fetched"] == 1


def test_killed_daemon_costs_no_miss(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    a.kill_daemon()
    wait_for(lambda: a.status()["pool"], "a new daemon serves")
    assert (b.path / "block").read_bytes() == b"x" * MIB


def test_index_that_lost_its_data_is_filled_again(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    index = redis.Redis(port=int(pool.rpartition(":")[2].partition("/")[0]))
    index.flushall()
    wait_for(lambda: index.exists("kvfs:kv:o:@0/block"), "it is announced again")
    wait_for(lambda: not absent(b.path / "block"), "the lease is there again")
    assert (b.path / "block").read_bytes() == b"x" * MIB


def backing(kv: Mounted, name: str) -> list[Path]:
    """The files of an object, in all tiers."""
    ino = (kv.path / name).stat().st_ino
    roots = [Path(kv.status()["tiers"][tier]["path"]) for tier in ("ram", "nvme")]
    return [one for root in roots for one in root.glob(f"objects/{ino % 256:02x}/{ino:x}.*")]


def test_wrong_bytes_of_a_peer_are_a_miss(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    a.idle()
    for path in backing(a, "block"):
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(b"y")
    assert read(b.path / "block") is None
    assert b.status()["pool"]["counters"]["failed"] == 1
    (b.path / "block").write_bytes(b"mine")
    assert read(b.path / "block") == b"mine"


def test_first_object_of_a_name_stands(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    c = node(mount, pool, "c")
    index = redis.Redis(port=int(pool.rpartition(":")[2].partition("/")[0]))
    write(a, "block", b"of a")
    index.rename("kvfs:kv:o:@0/block", "aside")  # so that b does not find it
    wait_for(lambda: absent(b.path / "block"), "it is not found")
    with (b.path / "block").open("wb") as file:
        file.write(b"of b")
        index.rename("aside", "kvfs:kv:o:@0/block")
    wait_for(lambda: b.status()["pool"]["counters"]["conflicts"] == 1, "b notices")
    assert read(b.path / "block") == b"of b"
    assert read(c.path / "block") == b"of a"


def test_index_that_hangs_costs_misses_only(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        kv.allow_log("the pool's index is down|the pool learns later of changes")
    write(a, "block", b"x" * MIB)
    write(b, "here", b"y" * MIB)
    index = redis.Redis(port=int(pool.rpartition(":")[2].partition("/")[0]))
    pid = index.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert absent(b.path / "block")
        for number in range(20):
            assert (b.path / "here").read_bytes() == b"y" * MIB
            (b.path / f"{number}").write_bytes(b"z")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: read(b.path / "block") == b"x" * MIB, "the index answers again")
    wait_for(lambda: read(a.path / "19") == b"z", "what was written meanwhile is announced")


def test_peer_that_hangs_is_a_miss_within_the_wait(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, f"{pool},pool_wait=1", "b")
    write(a, "block", b"x" * MIB)
    assert not absent(b.path / "block")
    folder = runtime.runtime_dir(a.path) / "nginx"
    workers = Nginx(folder).pids
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert read(b.path / "block") is None
        assert time.monotonic() - began < 5
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: read(b.path / "block") == b"x" * MIB, "the peer answers again")


def test_node_that_leaves_is_not_asked(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    a.umount()
    assert read(b.path / "block") is None
    a.mount()
    wait_for(lambda: read(b.path / "block") == b"x" * MIB, "it is announced from nvme")


def test_remote_names_end_with_the_mount(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    assert not absent(b.path / "block")
    b.umount("--now")
    a.umount("--now")
    b.mount()
    b.idle()
    assert os.listdir(b.path) == []
    b.check_accounts()


def test_daemon_that_takes_over_fetches_what_its_predecessor_found(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    with os.fdopen(os.open(b.path / "block", os.O_PATH)) as held:
        b.kill_daemon()
        wait_for(lambda: b.status()["pool"]["index"]["up"], "a new daemon serves")
        path = f"/proc/self/fd/{held.fileno()}"
        wait_for(lambda: read(Path(path)) == b"x" * MIB, "it is fetched")


def test_blocks_of_other_nodes_count_in_matches(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    keys = chain(200)
    for kv in (a, b):
        request(kv.path, "ns_create", name="blocks", settings={"prefix": "on"}, uid=0, gid=0)
        (kv.path / "blocks" / ROOT.hex()).mkdir()
    write_blocks(a.path / "blocks", keys)
    write_blocks(b.path / "blocks", keys[:3])
    wait_for(lambda: announced(a) == 200, "they are announced")
    found = ask(b.path / "blocks", [*keys, bytes(16)])
    assert (found.blocks, found.ram + found.nvme, found.bucket) == (200, 3 * BLOCK, 197 * BLOCK)
    assert found.tiers[3:] == bytes([matching.BUCKET]) * 197
    assert found.sizes == (BLOCK,) * 200
    for before, key in pairwise([ROOT, *keys[:20]]):
        path = b.path / "blocks" / prefix.path(before, key)
        assert path.read_bytes() == key * (BLOCK // len(key))
    found = ask(b.path / "blocks", keys)
    assert (found.blocks, found.ram + found.nvme) == (200, 20 * BLOCK)
    a.umount("--now")
    wait_for(lambda: ask(b.path / "blocks", keys).blocks == 20, "only its own are left")


def test_node_comes_again_beside_the_nginx_of_its_killed_daemon(pool: str, mount: Mount) -> None:
    """The nginx of the killed daemon has the address of the node still."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    a.kill()
    a.expect_log("the last session did not end properly")
    a.mount()
    wait_for(lambda: announced(a) == 1, "it is announced again")
    assert (b.path / "block").read_bytes() == b"x" * MIB


def test_index_by_tls_of_the_authority_of_the_pool(tmp_path: Path, mount: Mount) -> None:
    """The machine does not know that authority: a mount without pool_tls trusts no such index."""
    folder = authority(tmp_path / "tls")
    files = (
        *("--tls-cert-file", str(folder / "cert.pem"), "--tls-key-file", str(folder / "key.pem")),
        *("--tls-ca-cert-file", str(folder / "ca.pem"), "--tls-auth-clients", "yes"),
    )
    port = free_port()
    index = start(tmp_path / "redis", 0, *files, "--tls-port", str(port))
    options = f"ram=64M,pool=rediss://127.0.0.1:{port}/kv,pool_address=127.0.0.1:{free_port()}"
    try:
        words = [*KVFS, "mount", str(tmp_path), "-o", options]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert "no TLS with it: [SSL: CERTIFICATE_VERIFY" in done.stderr
        kv = mount(f"{options},pool_tls={folder}", "a")
        write(kv, "block", b"x" * 100)
        assert kv.status()["pool"]["index"]["up"]
        kv.umount("--now")
    finally:
        index.kill()
        index.wait()


def test_node_with_certificates_reads_from_no_node_without(
    pool: str, mount: Mount, tmp_path: Path
) -> None:
    folder = authority(tmp_path / "tls")
    safe = f"{pool},pool_tls={folder}"
    a, b, c = node(mount, safe, "a"), node(mount, safe, "b"), node(mount, pool, "c")
    for kv, name in ((a, "with"), (c, "without")):
        write(kv, name, b"x" * MIB)
    assert read(b.path / "with") == b"x" * MIB
    assert read(b.path / "without") is None
    assert read(c.path / "with") is None
