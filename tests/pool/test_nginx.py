"""A real nginx that serves object files: what it gives, to whom, and as which user."""

import http.client
import os
import pwd
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvfs import acl
from kvfs.errors import ConfigError, KvfsError
from kvfs.pool import nginx
from kvfs.pool.nginx import Nginx, Program, Report, Served, account, installed, listen, read_report
from kvfs.tiers import RamTier
from kvfs.tiers.tier import Tier
from tests.harness import wait_for
from tests.pool.authority import authority
from tests.pool.servers import free_port

LOCAL = ("127.0.0.0/8",)
INO, VERSION = 0x11F, 0xA
DATA = b"the bytes of an object"
SECRET = b"not for peers"
ROOT = os.geteuid() == 0
pytestmark = pytest.mark.skipif(not ROOT, reason="serves as another user")


class SomeTier(Tier):
    """A tier in a directory of a test."""

    def put(self, ino: int, version: int, data: bytes) -> str:
        """Make a backing file as kvfs does, and return its path for peers."""
        os.close(self.create(ino, version))
        path = Path(self.path(ino, version))
        path.write_bytes(data)
        return f"/{self.name}/{path.parent.name}/{path.name}"


class Node:
    """A tier, and the server of its files."""

    def __init__(self, folder: Path) -> None:
        mask = os.umask(0o077)  # as the daemon has
        try:
            (folder / "tier").mkdir(0o700)
            self.tier = SomeTier(folder / "tier", 1 << 20)
            self.tier.name = "ram"
            self.tier.make_folders()
        finally:
            os.umask(mask)
        self.server = Nginx(folder / "server")
        self.port = free_port()
        self.served = Served(
            f"127.0.0.1:{self.port}",
            {"ram": folder / "tier" / "objects"},
            allow=LOCAL,
            user=account().pw_name,
            workers=1,
        )
        for above in folder.parents:
            if not acl.passes(above, account().pw_uid):
                acl.allow(above, account().pw_uid, acl.PASS)
        acl.allow(folder, account().pw_uid, acl.PASS)

    def put(self, ino: int = INO, version: int = VERSION, data: bytes = DATA) -> str:
        mask = os.umask(0o077)
        try:
            return self.tier.put(ino, version, data)
        finally:
            os.umask(mask)

    def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on the disk of the tests, and on a tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    at = tmp_path / "tmpfs"
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700", "tmpfs", at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path)
    found.tier.let_read(account().pw_uid)
    found.server.start(found.served)
    try:
        yield found
    finally:
        found.server.stop()


# Access


def test_workers_read_object_files_of_before_and_after(folder: Path) -> None:
    """Also a file that is renamed, and nothing but objects; not after `let_nobody_read`."""
    node = Node(folder)
    before = node.put(INO, 1)
    node.server.start(node.served)
    try:
        assert node.get(before)[0] == 403, "without access"
        node.tier.let_read(account().pw_uid)
        assert node.get(before) == (200, DATA)
        after = node.put(INO, 2)
        assert node.get(after) == (200, DATA)
        node.tier.rename(INO, 2, 3)
        assert node.get(after)[0] == 404
        assert node.get(after[:-1] + "3") == (200, DATA)
        node.tier.let_read(account().pw_uid)
        node.tier.let_nobody_read()
        assert node.get(before)[0] == 403
        node.tier.let_read(account().pw_uid)
        assert node.get(before) == (200, DATA)
    finally:
        node.server.stop()


def test_tmpfs_that_kvfs_has_mounted_is_passed(tmp_path: Path) -> None:
    """Also the directory above, which kvfs has made for all its tmpfs."""
    node = Node(tmp_path)
    mask = os.umask(0o077)
    ram = RamTier(tmp_path / "kvfs-ram" / "one", 1 << 20, identity="one", epoch=None, huge="never")
    try:
        path = SomeTier.put(ram, INO, VERSION, DATA)  # type: ignore[arg-type]
        ram.let_read(account().pw_uid)
        node.server.start(replace(node.served, roots={"ram": ram.root / "objects"}))
        assert node.get(path) == (200, DATA)
        ram.let_nobody_read()
        assert node.get(path)[0] == 403
    finally:
        os.umask(mask)
        node.server.stop()
        ram.close()
        ram.remove()


def test_links_and_missing_files_get_no_access(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "secret").write_bytes(SECRET)
    Path(node.tier.path(INO, VERSION)).symlink_to(tmp_path / "secret")
    node.tier.let_read(account().pw_uid)
    assert not acl.has(tmp_path / "secret", account().pw_uid)


def test_access_is_for_one_user_and_not_for_groups(node: Node) -> None:
    node.put()
    path = node.tier.path(INO, VERSION)

    def can_read(uid: int, gid: int) -> bool:
        command = ["cat", path]
        done = subprocess.run(command, user=uid, group=gid, extra_groups=[], capture_output=True)  # noqa: PLW1510
        return done.stdout == DATA

    user = account()
    assert can_read(user.pw_uid, 65534)
    assert not can_read(65534, user.pw_gid)
    assert not can_read(65534, 0)


def test_files_without_a_pool_are_only_for_their_owner(folder: Path) -> None:
    node = Node(folder)
    node.put()
    assert os.stat(node.tier.path(INO, VERSION)).st_mode & 0o777 == 0o600
    assert os.stat(node.tier.root / "objects").st_mode & 0o077 == 0


def test_folder_that_the_workers_cannot_pass_is_said(tmp_path: Path) -> None:
    node = Node(tmp_path)
    tmp_path.chmod(0o700)  # also clears the mask of the entries
    with pytest.raises(ConfigError, match=f"cannot pass {tmp_path}: setfacl -m u:[0-9]+:x"):
        node.tier.let_read(account().pw_uid)


def test_acl_keeps_other_access(folder: Path) -> None:
    file = folder / "file"
    file.touch()
    file.chmod(0o640)
    acl.allow(file, 1234, acl.READ)
    acl.allow(file, 1234, acl.READ)
    acl.allow(file, 5678, acl.READ | acl.WRITE)
    told = subprocess.run(
        ["stat", "-c", "%a", file], capture_output=True, text=True, check=True
    ).stdout
    assert told == "660\n", "the group's bits are the mask now"
    assert acl.has(file, 1234)
    assert not acl.has(file, 1)
    file.chmod(0o600)
    acl.allow(file, 1, acl.READ)
    assert not acl.passes(folder, 1234) or folder.stat().st_mode & 1
    acl.remove(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert not acl.has(file, 1234)


def test_workers_are_not_root(node: Node) -> None:
    path = node.put()
    assert node.get(path)[0] == 200
    owners = {pid: os.stat(f"/proc/{pid}").st_uid for pid in node.server.pids}
    assert sorted(owners.values()) == [0, account().pw_uid]


# Paths


def test_only_object_files_are_served(node: Node) -> None:
    path = node.put()
    objects = node.tier.root / "objects"
    (objects / "1f" / ".hidden").write_bytes(SECRET)
    (objects / "1f" / "1f.1.part").write_bytes(SECRET)
    (objects / "secret").write_bytes(SECRET)
    (node.tier.root / "quarantine" / "1f.1").write_bytes(SECRET)
    (node.tier.root / "1f.1").write_bytes(SECRET)
    os.mkfifo(objects / "1f" / "1f.2")
    (objects / "1f" / "1f.3").mkdir()
    (objects / "1f" / "1f.4").symlink_to(node.tier.root / "1f.1")
    (objects / "1f" / "1f.5").symlink_to("11f.a")
    (objects / "ab").rmdir()
    (objects / "ab").symlink_to("1f")
    for file in node.tier.root.rglob("*"):
        if not file.is_symlink():
            file.chmod(0o777 if file.is_dir() else 0o666)
    assert node.get(path) == (200, DATA)
    for refused in (
        *("/", "/ram", "/ram/", "/ram/1f", "/ram/1f/", "/nvme/1f/11f.a", "/ram/11f.a", "/1f/11f.a"),
        *("//ram/1f/11f.a", "/ram//1f/11f.a", "/ram/1f//11f.a", "/ram/1f/11f.a/", "/ram/1F/11f.a"),
        *("/ram/1f/../1f/11f.a", "/ram/./1f/11f.a", "/x/../ram/1f/11f.a", "/ram/1f/11f%2ea"),
        *("/ram/1f%2f11f.a", "/ram%2f1f%2f11f.a", "/%72am/1f/11f.a", "/ram/1f/11f.a%00"),
        *("/ram/1f/11f.a?x=1", "/ram/1f/11f.a?", "/ram/1f/11f.a#x", "/ram/1f/11f.a%0a"),
        *(
            "/ram/1f/.hidden",
            "/ram/1f/1f.1.part",
            "/ram/secret",
            "/ram/../1f.1",
            "/ram/1f/../../1f.1",
        ),
        *("/ram/quarantine/1f.1", "/ram/../quarantine/1f.1", "/ram/..%2fquarantine%2f1f.1"),
        *("/ram/1f/1f.2", "/ram/1f/1f.3", "/ram/1f/1f.3/", "/ram/1f/1f.4", "/ram/1f/1f.5"),
        *("/ram/ab/11f.a", "/ram/1f/1f.99", "/ram/1f/11f.a\\..", "http://x/ram/1f/11f.b"),
    ):
        status, body = node.get(refused)
        assert status in {301, 400, 403, 404}, refused  # 301: a folder with the name of a file
        assert DATA not in body, refused
        assert SECRET not in body, refused


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "MKCOL", "COPY", "PATCH", "OPTIONS"])
def test_files_are_only_read(node: Node, method: str) -> None:
    path = node.put()
    status, body = node.get(path, method)
    assert status in {403, 404, 405}
    assert DATA not in body
    assert node.get(path) == (200, DATA)
    assert node.get(path, "HEAD") == (200, b"")


def test_clients_of_other_networks_read_nothing(node: Node) -> None:
    path = node.put()
    node.server.start(Served(node.served.address, node.served.roots, ("10.0.0.0/8", "::1/128")))
    status, body = node.get(path)
    assert (status, DATA in body) == (403, False)
    node.server.start(Served(node.served.address, node.served.roots))
    assert node.get(path)[0] == 403, "nobody may read where neither networks nor TLS are given"


def test_clients_need_a_certificate_of_the_pool(tmp_path: Path, node: Node) -> None:
    right, other = authority(tmp_path / "right"), authority(tmp_path / "other")
    peer = authority(tmp_path / "peer", signed_by=right)
    path = node.put()
    node.server.start(
        Served(node.served.address, node.served.roots, tls=right, user=account().pw_name)
    )

    def get(certificate: Path | None) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=str(right / "ca.pem"))
        if certificate is not None:
            context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
        connection = http.client.HTTPSConnection(
            "127.0.0.1", node.port, timeout=20, context=context
        )
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    assert get(peer) == (200, DATA)
    for wrong in (None, other):
        status, body = get(wrong)
        assert (status, DATA in body) == (400, False)
    assert node.get(path)[0] == 400, "no TLS"


def test_networks_hold_with_tls_too(tmp_path: Path) -> None:
    program = Program("nginx", (1, 22, 1), ktls=True, threads=True)
    served = Served("127.0.0.1:1", {}, ("10.1.2.3/8",), tls=tmp_path)
    text = served.config(tmp_path, program)
    assert "ssl_verify_client on;" in text
    assert re.search(r"allow 10\.0\.0\.0/8;\s+deny all;", text)
    assert "Options KTLS" in text
    old = served.config(tmp_path, program._replace(ktls=False))
    assert "ssl_conf_command" not in old, "nginx does not start with what it does not know"


# Start and stop


def test_taken_address_is_said(node: Node) -> None:
    second = Nginx(node.server.folder.parent / "second")
    with pytest.raises(ConfigError, match=f"pool_address=127.0.0.1:{node.port}.*in use.*another"):
        second.start(node.served)
    assert not second.pids
    assert node.server.alive


def test_address_of_another_machine_is_said(tmp_path: Path) -> None:
    server = Nginx(tmp_path / "server")
    with pytest.raises(ConfigError, match=r"pool_address=192.0.2.1:80: .*no address of this"):
        server.start(Served("192.0.2.1:80", {}, LOCAL))
    assert not server.alive


@pytest.mark.parametrize("wrong", ["a b", "a$b", 'a"b', "a;b", "a{b", "a\nb"])
def test_path_that_nginx_would_misread_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"nginx cannot serve .*give another directory"):
        Nginx(tmp_path).start(Served("127.0.0.1:1", {"ram": tmp_path / wrong}))


def test_network_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pool_allow=all;: expected networks such as"):
        Nginx(tmp_path).start(Served("127.0.0.1:1", {}, ("all;",)))


def test_missing_certificates_are_said(tmp_path: Path) -> None:
    with pytest.raises(KvfsError, match=r"does not serve.*cert.pem"):
        Nginx(tmp_path / "a").start(Served(f"127.0.0.1:{free_port()}", {}, tls=tmp_path / "b"))


def test_missing_and_old_nginx_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nginx, "PROGRAM", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"is missing.*apt-get install nginx-light"):
        installed()
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho nginx version: nginx/1.17.9 >&2\n")
    old.chmod(0o755)
    monkeypatch.setattr(nginx, "PROGRAM", str(old))
    with pytest.raises(ConfigError, match=r"nginx/1.17.9, expected 1.18 or newer"):
        installed()


def test_server_of_a_dead_daemon_goes_on_or_is_replaced(node: Node) -> None:
    """It goes on if it serves the same."""
    path = node.put()
    old = node.server.pids
    assert len(old) == 2
    next_daemon = Nginx(node.server.folder)
    assert next_daemon.pids == old
    next_daemon.start(node.served)
    assert next_daemon.pids == old
    assert next_daemon.alive
    next_daemon.start(replace(node.served, workers=2))
    try:
        assert not set(old) & set(next_daemon.pids)
        assert node.get(path) == (200, DATA)
    finally:
        next_daemon.stop()


def test_workers_of_a_dead_master_are_replaced(node: Node) -> None:
    """They serve on, and hold the address."""
    path = node.put()
    master, worker = node.server.pids
    os.kill(master, signal.SIGKILL)
    wait_for(lambda: not node.server.alive, "the master has ended")
    assert node.get(path) == (200, DATA)
    assert Nginx(node.server.folder).pids == [worker]
    node.server.start(node.served)
    assert worker not in node.server.pids
    assert node.get(path) == (200, DATA)


def test_dead_master_is_noticed_by_the_next_daemon(node: Node) -> None:
    """It has not started the server, and the workers serve on without a master."""
    path = node.put()
    next_daemon = Nginx(node.server.folder)
    next_daemon.start(node.served)
    assert next_daemon.alive
    master, worker = node.server.pids
    os.kill(master, signal.SIGKILL)
    wait_for(lambda: not next_daemon.alive, "the next daemon notices")
    next_daemon.start(node.served)
    try:
        assert next_daemon.alive
        assert not {master, worker} & set(next_daemon.pids)
        assert node.get(path) == (200, DATA)
    finally:
        next_daemon.stop()


def test_stopped_server_is_ended(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nginx, "STOP_S", 0.2)
    for pid in node.server.pids:
        os.kill(pid, signal.SIGSTOP)
    node.server.stop()
    assert not node.server.pids


def test_stop_leaves_nothing_that_runs(node: Node) -> None:
    pids = node.server.pids
    node.server.stop()
    node.server.stop()
    assert not node.server.alive
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not (node.server.folder / "pid").exists()
    with pytest.raises(OSError, match="refused"):
        node.get("/")


def test_another_process_with_the_noted_number_is_left_alone(tmp_path: Path) -> None:
    server = Nginx(tmp_path)
    for noted in (f"{os.getpid()}\n", "1\n", "", "0", "99999999", "x", "-1"):
        (tmp_path / "pid").write_text(noted)
        assert server.pids == []
        server.stop()


# Reports


def test_each_get_is_reported(node: Node) -> None:
    path = node.put()
    with listen(node.server.folder / "reports", account().pw_uid) as reports:
        node.server.start(reporting(node))
        reports.settimeout(20)
        assert node.get(path) == (200, DATA)
        assert read_report(reports.recv(4096)) == Report("ram", "11f.a", 200, len(DATA))
        assert node.get("/ram/1f/1f.9")[0] == 404
        found = read_report(reports.recv(4096))
        assert found is not None
        assert found.status == 404
        node.get("/" + "x" * 3000)
        assert read_report(reports.recv(4096)) is None


def test_reports_that_nobody_reads_stop_nothing(node: Node) -> None:
    """The socket is full, then gone; and the error log does not grow with each GET."""
    path = node.put()
    with listen(node.server.folder / "reports", account().pw_uid):
        node.server.start(reporting(node))
        for _ in range(500):
            assert node.get(path) == (200, DATA)
    for _ in range(100):
        assert node.get(path) == (200, DATA)
    (node.server.folder / "reports").unlink()
    for _ in range(100):
        assert node.get(path) == (200, DATA)
    log = node.server.folder / "error.log"
    before = len(log.read_text().splitlines())
    for _ in range(100):
        assert node.get(path) == (200, DATA)
        assert node.get("/ram/1f/1f.9")[0] == 404
    # Each worker says it once, a slow one perhaps only now.
    assert len(log.read_text().splitlines()) < before + 20
    with listen(node.server.folder / "reports", account().pw_uid) as reports:
        reports.settimeout(20)
        assert node.get(path) == (200, DATA)
        assert read_report(reports.recv(4096)) == Report("ram", "11f.a", 200, len(DATA))


def test_only_the_workers_can_report(node: Node) -> None:
    with listen(node.server.folder / "reports", account().pw_uid) as reports:
        code = (
            "import socket, sys\n"
            "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', sys.argv[1])"
        )
        words = ["/usr/bin/env", "python3", "-c", code, reports.getsockname()]
        done = subprocess.run(words, user=pwd.getpwnam("nobody").pw_uid, capture_output=True)  # noqa: PLW1510
        assert b"Permission" in done.stderr
        with pytest.raises(BlockingIOError):
            reports.recv(1)


def reporting(node: Node) -> Served:
    served = node.served
    return Served(
        served.address,
        served.roots,
        LOCAL,
        user=served.user,
        workers=1,
        reports=node.server.folder / "reports",
    )


@pytest.mark.parametrize(
    "datagram",
    [b"", b"\xff" * 100, b"<190>x kvfs: /ram/../x 200 1", b"<190>x kvfs: /ram/1f/1f.1 20000 1"],
)
def test_other_datagrams_are_no_reports(datagram: bytes) -> None:
    assert read_report(datagram) is None


def test_socket_takes_no_stream(tmp_path: Path) -> None:
    with listen(tmp_path / "reports", os.geteuid()) as reports:
        assert reports.type == socket.SOCK_DGRAM
        assert (tmp_path / "reports").stat().st_mode & 0o777 == 0o600
