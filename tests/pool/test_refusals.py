"""A mount that cannot be a node of its pool is refused, in one line, and changes nothing."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from kvfs import runtime
from kvfs.errors import ConfigError
from kvfs.pool import nginx
from tests.conftest import Mount
from tests.harness import KVFS
from tests.pool.authority import authority
from tests.pool.servers import command, free_port, let_nginx_pass, peer, server

CALLER = 2
SECRET = "s3cr3t"  # noqa: S105 (of the servers of these tests)
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    with server(tmp_path_factory.mktemp("index"), port):
        yield port


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[Refused]:
    """Mount with these options of the pool, and return the one line that refuses it."""
    where = tmp_path / "kv"
    where.mkdir()

    def mount(options: str, *, before: tuple[str, ...] = (), **environ: str) -> str:
        if "nvme=" not in options:
            options = f"nvme={tmp_path}/nvme,{options}"
        options = f"ram=32M,nvme_size=64M,{options}"
        words = [*before, *KVFS, "mount", str(where), "-o", options]
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env=os.environ | environ
        )
        assert (done.returncode, done.stdout) == (CALLER, ""), done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert SECRET not in done.stderr
        assert not (tmp_path / "nvme").exists()
        assert runtime.mount_at(where) is None
        return done.stderr

    yield mount
    assert list(where.iterdir()) == []


def at(port: int, *more: str) -> str:
    address = f"pool_address=127.0.0.1:{free_port()}"
    if any(one.startswith("pool_address=") for one in more):
        address = ""
    return ",".join(filter(None, (f"pool=redis://127.0.0.1:{port}/kv", address, *more)))


def test_index_that_does_not_answer(tmp_path: Path, refused: Refused) -> None:
    log = tmp_path / "log"
    told = refused(at(free_port(), f"log={log}"))
    assert ": Connection refused; start the index" in told
    cure = "start the index, or mount without it by pool_required=off"
    assert cure in told
    assert [cure in line for line in log.read_text().splitlines()] == [True]


def test_index_that_does_not_answer_is_not_required(mount: Mount) -> None:
    kv = mount(f"ram=32M,{at(free_port(), 'pool_required=off')}")
    (told,) = [line for line in kv.said.splitlines() if "index" in line]
    assert told.startswith("kvfs: the pool's index does not answer: ")
    assert told.endswith(": Connection refused; kvfs is mounted, and asks again")
    kv.expect_log("the pool's index is down")
    kv.allow_log("the pool learns later of changes")
    (kv.path / "file").write_bytes(b"x")
    assert (kv.path / "file").read_bytes() == b"x"
    assert not kv.status()["pool"]["index"]["up"]


def test_server_that_is_no_redis(refused: Refused) -> None:
    def web(taken: socket.socket) -> None:
        while taken.recv(4096):
            taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with peer(web) as port:
        assert "it is no Redis server" in refused(at(port))
        assert "it is no Redis server" in refused(at(port, "pool_required=off"))


@pytest.mark.parametrize(("password", "said"), [("other", "WRONGPASS"), ("", "NOAUTH")])
def test_wrong_password(tmp_path: Path, refused: Refused, password: str, said: str) -> None:
    port = free_port()
    with server(tmp_path / "redis", port, password=SECRET):
        told = refused(at(port), KVFS_POOL_PASSWORD=password)
    assert said in told
    assert "pool_credentials=FILE" in told


def test_user_that_may_not_ask(tmp_path: Path, refused: Refused) -> None:
    port = free_port()
    with server(tmp_path / "redis", port):
        client = redis.Redis(port=port)
        client.execute_command("ACL", "SETUSER", "weak", "on", f">{SECRET}", "~*", "+@connection")  # type: ignore[no-untyped-call]
        told = refused(at(port), KVFS_POOL_USER="weak", KVFS_POOL_PASSWORD=SECRET)
    assert "NOPERM" in told
    assert "the user needs the commands of docs/pool.md" in told
    assert "pool_credentials" not in told


@pytest.mark.parametrize("missing", ["eval", "evalsha", "hset", "srem", "persist"])
def test_user_that_may_not_use_a_command_of_a_script(
    tmp_path: Path, refused: Refused, missing: str
) -> None:
    port = free_port()
    with server(tmp_path / "redis", port):
        command(port, "ACL", "SETUSER", "weak", "on", f">{SECRET}", "~*", "+@all", f"-{missing}")
        told = refused(at(port), KVFS_POOL_USER="weak", KVFS_POOL_PASSWORD=SECRET)
    assert "NOPERM" in told
    assert missing in told.lower()
    assert "the user needs the commands of docs/pool.md" in told


def test_user_with_the_keys_of_another_pool(tmp_path: Path, refused: Refused) -> None:
    port = free_port()
    with server(tmp_path / "redis", port):
        words = ("ACL", "SETUSER", "weak", "on", f">{SECRET}", "~kvfs:other:*", "+@all")
        command(port, *words)
        told = refused(at(port), KVFS_POOL_USER="weak", KVFS_POOL_PASSWORD=SECRET)
    assert "NOPERM" in told
    assert "the ACL of the user needs ~kvfs:kv:*" in told
    assert "pool_credentials" not in told
    assert told.count("pool=") == 1


def test_host_that_nobody_knows(refused: Refused) -> None:
    unknown = "pool=redis://nosuch.invalid:6379/kv"
    told = refused(f"{unknown},pool_address=127.0.0.1:{free_port()}")
    assert "'nosuch.invalid'" in told
    assert "correct the host in pool=, or mount without it by pool_required=off" in told
    assert "start the index" not in told
    told = refused(unknown)
    assert told.endswith("correct the host in pool=\n")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("10.0.0.5/8", "10.0.0.0/8"), ("127.0.0.0/8+fd00::1/64", "fd00::/64")],
)
def test_network_with_host_bits_is_named(refused: Refused, given: str, meant: str) -> None:
    told = refused(at(free_port(), f"pool_allow={given}"))
    assert f"pool_allow={given}: expected {meant} in place of {given.rpartition('+')[2]}" in told
    assert "host bits" in told


@pytest.mark.parametrize(("kind", "path"), [("sentinel", "main/kv"), ("cluster", "kv")])
def test_plain_redis_in_place_of_others(index: int, refused: Refused, kind: str, path: str) -> None:
    url = f"redis+{kind}://127.0.0.1:{index}/{path}"
    told = refused(f"pool={url},pool_address=127.0.0.1:{free_port()}")
    assert f"it is no {kind}: give redis:// for a plain Redis server, or redis+" in told
    assert "start the index" not in told
    assert told.count(url) == 1


def test_password_goes_to_no_index_without_tls(refused: Refused) -> None:
    """With rediss:// a server that speaks no TLS gets no command."""
    heard: list[bytes] = []

    def listen(taken: socket.socket) -> None:
        heard.append(taken.recv(4096))

    with peer(listen) as port:
        options = at(port).replace("redis:", "rediss:")
        refused(options, KVFS_POOL_PASSWORD=SECRET)
    assert heard
    assert not [one for one in heard if SECRET.encode() in one or b"PING" in one]


def test_index_by_tls_of_an_unknown_authority(tmp_path: Path, refused: Refused) -> None:
    other = authority(tmp_path / "other")
    with server_with_tls(tmp_path) as port:
        told = refused(at(port, f"pool_tls={other}").replace("redis:", "rediss:"))
    assert "kvfs refuses its certificate" in told
    assert "add its authority to ca.pem of pool_tls=, or to this machine" in told


def test_index_by_tls_of_another_name(tmp_path: Path, refused: Refused) -> None:
    with server_with_tls(tmp_path) as port:
        options = at(port, f"pool_tls={tmp_path / 'index'}")
        told = refused(options.replace("redis://127.0.0.1", "rediss://127.1"))
    assert "kvfs refuses its certificate" in told
    assert "'127.1'): give it the name or address in pool=" in told


def test_index_that_speaks_no_tls(index: int, refused: Refused) -> None:
    told = refused(at(index).replace("redis:", "rediss:"))
    assert "it speaks no TLS, or hangs: use redis:// for an index without TLS; or mount " in told
    assert "start the index" not in told


def test_index_that_speaks_first_and_no_tls(tmp_path: Path, refused: Refused) -> None:
    """Redis refuses a client by plain text, if it has too many, or in its protected mode."""
    port = free_port()
    with server(tmp_path / "redis", port), redis.Redis(port=port) as client:
        client.config_set("maxclients", 1)
        told = refused(at(port).replace("redis:", "rediss:"))
    assert told.endswith("use redis:// for an index without TLS\n")


def test_index_that_wants_tls(tmp_path: Path, refused: Refused) -> None:
    with server_with_tls(tmp_path) as port:
        told = refused(at(port))
    assert "it may expect rediss://; or mount without it by pool_required=off" in told
    assert "start the index" not in told


@contextmanager
def server_with_tls(tmp_path: Path) -> Iterator[int]:
    """Serve an index by TLS, and yield its port."""
    port, own = free_port(), authority(tmp_path / "index")
    files = (
        *("--tls-cert-file", str(own / "cert.pem"), "--tls-key-file", str(own / "key.pem")),
        *("--tls-ca-cert-file", str(own / "ca.pem"), "--tls-port", str(port)),
    )
    with server(tmp_path / "redis", free_port(), *files):
        yield port


def test_index_that_is_too_old(refused: Refused) -> None:
    def old(taken: socket.socket) -> None:
        while data := taken.recv(4096):
            told = b"redis_version:4.0.9\r\n"
            info = b"$%d\r\n%s\r\n$-1\r\n" % (len(told), told)
            taken.sendall(info if b"INFO" in data else b"+PONG\r\n")

    with peer(old) as port:
        assert "Redis 4.0 is too old, expected 5.0 or newer" in refused(at(port))


def test_pool_of_a_newer_format(tmp_path: Path, refused: Refused) -> None:
    port = free_port()
    with server(tmp_path / "redis", port):
        redis.Redis(port=port).set("kvfs:kv:format", "2")
        assert "the pool has format 2, this kvfs knows 1: upgrade kvfs" in refused(at(port))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("192.0.2.1:7400", "expected an address of this machine"),
        ("0.0.0.0:7400", "expected IP or IP:PORT"),
        ("127.0.0.1:70000", "expected IP or IP:PORT"),
        ("[fe80::1%lo]:18150", "pool_address=[fe80::1%lo]:18150: expected IP or IP:PORT"),
        ("224.0.0.1:7400", "expected IP or IP:PORT"),
        ("[ff02::1]:7400", "expected IP or IP:PORT"),
        ("255.255.255.255", "expected IP or IP:PORT"),
    ],
)
def test_address_that_others_cannot_reach(
    index: int, refused: Refused, address: str, said: str
) -> None:
    options = at(index, f"pool_address={address}", "pool_allow=192.0.2.0/24")
    assert said in refused(options)


def test_copies_that_kvfs_does_not_know(index: int, refused: Refused) -> None:
    told = refused(at(index, "pool_copies=x"))
    assert "option pool_copies=x: expected one of drop, keep" in told


def test_port_that_is_taken(index: int, refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        told = refused(at(index, f"pool_address={address}"))
    assert "Address already in use; expected an address of this machine, with a free port" in told


def test_network_that_could_read_everything(index: int, refused: Refused) -> None:
    told = refused(at(index, "pool_address=192.0.2.1:7400"))
    assert "all of its network could read the objects; give pool_allow=" in told


def test_network_that_is_none(refused: Refused) -> None:
    """The configuration says so in the words of `kvfs.pool.nginx`, which are documented."""
    told = refused(at(free_port(), "pool_allow=127.0.0.1/99"))
    with pytest.raises(ConfigError) as error:
        nginx.Served("127.0.0.1:1", {}, ("127.0.0.1/99",)).config(Path("/"), nginx.installed())
    assert f"option {error.value}\n" in told


def test_certificates_that_do_not_match(tmp_path: Path, index: int, refused: Refused) -> None:
    ours, other = authority(tmp_path / "ours"), authority(tmp_path / "other")
    for name, said in (
        ("key.pem", "key.pem is not the key of cert.pem"),
        ("ca.pem", "expected a cert.pem that ca.pem has signed"),
        ("cert.pem", "key.pem is not the key of cert.pem"),
    ):
        mixed = tmp_path / f"mixed-{name}"
        shutil.copytree(ours, mixed)
        shutil.copy(other / name, mixed / name)
        assert said in refused(at(index, f"pool_tls={mixed}"))
    for name, expected in (
        ("key.pem", "expected a certificate in cert.pem, and its key"),
        ("ca.pem", "expected certificates of an authority in ca.pem"),
    ):
        (mixed / name).write_text("no certificate")
        assert expected in refused(at(index, f"pool_tls={mixed}"))
    (mixed / "cert.pem").unlink()
    told = refused(at(index, f"pool_tls={mixed}"))
    assert "cert.pem: No such file or directory: expected ca.pem, cert.pem and key.pem" in told
    os.mkfifo(mixed / "cert.pem")
    assert "cert.pem: it is no file: expected" in refused(at(index, f"pool_tls={mixed}"))


def test_nginx_that_is_too_old(tmp_path: Path, index: int, refused: Refused) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nginx"
    program.write_text("#!/bin/sh\necho nginx version: nginx/1.14.2 >&2\n")
    program.chmod(0o755)
    told = refused(at(index), PATH=f"{program.parent}:{os.environ['PATH']}")
    assert re.search(r"nginx is nginx version: nginx/1.14.2, expected 1.18 or newer", told)


@pytest.mark.skipif(os.geteuid() != 0, reason="hides a program in a mount namespace")
def test_nginx_that_is_missing(index: int, refused: Refused) -> None:
    """The program of this machine is hidden from the mount."""
    hide = f'mount --bind /dev/null {nginx.installed().path}; exec "$@"'
    told = refused(at(index), before=("unshare", "--mount", "sh", "-c", hide, "sh"))
    assert "nginx is missing, peers cannot read from here: apt-get install nginx-light" in told


def test_identity_that_is_alive_elsewhere(
    tmp_path: Path, index: int, refused: Refused, mount: Mount
) -> None:
    """The NVMe directory of a live node was copied."""
    let_nginx_pass(tmp_path)
    a = mount(f"ram=32M,nvme={{tmp}}/a-nvme,nvme_size=64M,{at(index)}", "a")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "a-nvme", copy, ignore=_sockets)
    before = sorted(copy.rglob("*"))
    told = refused(at(index).replace("pool=", f"nvme={copy},pool="))
    live = f"the live node {socket.gethostname()}:{a.path} has the identity of this NVMe directory"
    assert f"{live}: it uses the directory, or the directory was copied" in told
    assert sorted(copy.rglob("*")) == before
    a.umount("--now")


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]
