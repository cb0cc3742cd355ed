"""Mounts of a pool whose index has sentinels, or is a cluster, or whose nodes have certificates."""

import contextlib
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.pool.authority import authority
from tests.pool.servers import cluster, free_port, let_nginx_pass, seen, sentinel, server
from tests.pool.test_two_nodes import absent, announced, gets, node, read, write

MIB = 1 << 20
QUIET = "the pool's index is down|the pool learns later of changes"


@pytest.fixture(autouse=True)
def _reachable(tmp_path: Path) -> None:
    """Let nginx pass the folders of pytest, which are private."""
    let_nginx_pass(tmp_path)


def options(url: str, *more: str) -> str:
    given = ",".join(("ram=64M,nvme={tmp}/NAME-nvme,nvme_size=256M", *more))
    return f"{given},pool={url}"


def expect_shared(a: Mounted, b: Mounted) -> None:
    """Objects of one node are read, listed and unlinked at the other."""
    (a.path / "folder").mkdir()
    data = {f"folder/{number}": os.urandom(50_000) for number in range(30)}
    for name, content in data.items():
        (a.path / name).write_bytes(content)
    wait_for(lambda: announced(a) == len(data), "they are announced")
    for name, content in data.items():
        gets(b, name, content)
    wait_for(lambda: announced(b) == len(data), "the copies are announced")
    first, *rest = sorted(data)
    (b.path / first).unlink()
    wait_for(lambda: absent(a.path / first), "the other node lets its object go")
    wait_for(
        lambda: sorted(f"folder/{name}" for name in os.listdir(b.path / "folder")) == rest,
        "the others stay",
    )


def test_index_that_is_a_cluster(tmp_path: Path, mount: Mount) -> None:
    ports = [free_port() for _ in range(3)]
    hosts = r"\,".join(f"127.0.0.1:{port}" for port in ports)
    with cluster(tmp_path / "redis", ports):
        given = options(f"redis+cluster://{hosts}/kv")
        a, b = node(mount, given, "a"), node(mount, given, "b")
        expect_shared(a, b)
        counts = [redis.Redis(port=port).dbsize() for port in ports]
        a.umount("--now")
        b.umount("--now")
    assert all(counts)


@contextlib.contextmanager
def watched(tmp_path: Path, watch: int, master: int) -> Iterator[None]:
    conf = sentinel(tmp_path / "sentinel", watch, master)
    words = ["redis-server", str(conf), "--sentinel", "--logfile", str(tmp_path / "s.log")]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_master_that_fails_is_no_error_for_programs(tmp_path: Path, mount: Mount) -> None:
    """Programs write and read at both nodes until the replica is the master."""
    master, replica, watch = free_port(), free_port(), free_port()
    with (
        server(tmp_path / "1", master) as first,
        server(tmp_path / "2", replica, "--replicaof", f"127.0.0.1 {master}"),
        watched(tmp_path, watch, master),
    ):
        wait_for(lambda: seen(watch, replica), "the sentinel knows the replica")
        given = options(f"redis+sentinel://127.0.0.1:{watch}/main/kv")
        a, b = node(mount, given, "a"), node(mount, given, "b")
        for kv in (a, b):
            kv.allow_log(QUIET)
        expect_wrong_service_refused(tmp_path / "other", given)
        expect_shared(a, b)
        redis.Redis(port=master).wait(1, 5000)
        first.kill()
        written = 0
        while redis.Redis(port=replica).role()[0] != b"master":
            name = f"during-{written}"
            (a.path / name).write_bytes(name.encode())
            assert (a.path / name).read_bytes() == name.encode()
            assert read(b.path / name) in {None, name.encode()}
            os.listdir(b.path)
            written += 1
        assert written
        for name in ("during-0", f"during-{written - 1}"):
            gets(b, name, name.encode())
        write(b, "after", b"x" * MIB)
        gets(a, "after", b"x" * MIB)
        (a.path / "after").unlink()
        wait_for(lambda: absent(b.path / "after"), "the new master knows it")
        a.umount("--now")
        b.umount("--now")


def expect_wrong_service_refused(path: Path, given: str) -> None:
    path.mkdir()
    wrong = given.replace("/main/", "/nosuch/").replace("{tmp}/NAME", str(path))
    words = [*KVFS, "mount", str(path), "-o", f"{wrong},pool_address=127.0.0.1:{free_port()}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    cure = "correct the service in pool=, or mount without it by pool_required=off"
    assert f"it knows no master of service nosuch; {cure}" in done.stderr


def test_nodes_with_certificates(tmp_path: Path, mount: Mount) -> None:
    """Each node has a certificate of the pool's authority, and the index wants it, too."""
    one = authority(tmp_path / "one")
    two = authority(tmp_path / "two", signed_by=one)
    stranger = authority(tmp_path / "stranger")
    plain, port = free_port(), free_port()
    files = (
        *("--tls-cert-file", str(one / "cert.pem"), "--tls-key-file", str(one / "key.pem")),
        *("--tls-ca-cert-file", str(one / "ca.pem"), "--tls-port", str(port)),
    )
    with server(tmp_path / "redis", plain, *files):
        url = f"rediss://127.0.0.1:{port}/kv"
        a = node(mount, options(url, f"pool_tls={one}"), "a")
        b = node(mount, options(url, f"pool_tls={two}"), "b")
        expect_shared(a, b)
        write(a, "large", b"x" * (8 * MIB))
        gets(b, "large", b"x" * (8 * MIB))
        address = a.status()["pool"]["address"].rpartition(":")
        for folder in (None, stranger):
            context = ssl.create_default_context(cafile=str(one / "ca.pem"))
            if folder is not None:
                context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
            assert answer(context, (address[0], int(address[2]))).startswith(b"HTTP/1.1 400")
        a.umount("--now")
        b.umount("--now")


def answer(context: ssl.SSLContext, address: tuple[str, int]) -> bytes:
    """The first line that nginx answers to a client with these certificates."""
    with (
        socket.create_connection(address) as plain,
        context.wrap_socket(plain, server_hostname=address[0]) as secure,
    ):
        secure.sendall(b"GET /ram/00/1.1 HTTP/1.1\r\nHost: x\r\n\r\n")
        return secure.recv(4096).partition(b"\r\n")[0]
