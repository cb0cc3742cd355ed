"""Certificates and the password of a node are replaced while it is mounted."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from kvfs.cli.pool import facts
from kvfs.core.pool.news import News
from kvfs.core.pool.renewal import Renewal
from kvfs.errors import KvfsError
from kvfs.pool.certificates import Validity, expect_match
from kvfs.pool.credentials import Credentials
from kvfs.pool.member import Membership
from kvfs.pool.peer_file import context_of
from kvfs.pool.place import PoolPlace
from kvfs.pool.servers import Servers
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.pool.authority import authority
from tests.pool.servers import command, free_port, server, start
from tests.pool.test_two_nodes import gets, node, read, write
from tests.pool.test_visible import news

MIB = 1 << 20
DAY = 86400.0


def replace(folder: Path, other: Path) -> None:
    """Replace the files of a node by those of another directory, as an operator does."""
    for name in ("ca.pem", "cert.pem", "key.pem"):
        shutil.copy(other / name, folder / f".{name}")
        (folder / f".{name}").rename(folder / name)


def index_is_up(kv: Mounted) -> bool:
    return bool(kv.status()["pool"]["index"]["up"])


def password_problem(kv: Mounted) -> str:
    return str(kv.status()["pool"]["password_problem"])


def renewed(kv: Mounted) -> bool:
    return bool(news(kv, "certificate renewed"))


def test_renewed_certificates_are_used_without_a_new_mount(
    pool: str, mount: Mount, tmp_path: Path
) -> None:
    """The third node knows only the new authority, so no file of the old one helps it."""
    folder, new = authority(tmp_path / "tls"), authority(tmp_path / "new")
    mine = shutil.copytree(folder, tmp_path / "mine")
    a = node(mount, f"{pool},pool_tls={mine}", "a")
    b = node(mount, f"{pool},pool_tls={folder}", "b")
    write(b, "old", b"x" * MIB)
    write(b, "small", b"x")
    gets(a, "old", b"x" * MIB)
    gets(a, "small", b"x")
    replace(mine, new)
    wait_for(lambda: renewed(a), "the files are read")
    c = node(mount, f"{pool},pool_tls={new}", "c")
    for size in (1, MIB):
        write(a, f"from-a-{size}", b"y" * size)
        gets(c, f"from-a-{size}", b"y" * size)
        write(c, f"from-c-{size}", b"z" * size)
        gets(a, f"from-c-{size}", b"z" * size)


def test_daemon_that_takes_over_has_nginx_read_the_files(
    pool: str, mount: Mount, tmp_path: Path
) -> None:
    """The files may have changed while no daemon looked at them."""
    folder, new = authority(tmp_path / "tls"), authority(tmp_path / "new")
    a = node(mount, f"{pool},pool_tls={folder}", "a")
    write(a, "block", b"x" * MIB)
    replace(folder, new)
    a.kill_daemon()
    c = node(mount, f"{pool},pool_tls={new}", "c")
    gets(c, "block", b"x" * MIB)


def test_files_that_do_not_fit_together_change_nothing(
    pool: str, mount: Mount, tmp_path: Path
) -> None:
    folder, other = authority(tmp_path / "tls"), authority(tmp_path / "other")
    mine = shutil.copytree(folder, tmp_path / "mine")
    a = node(mount, f"{pool},pool_tls={mine}", "a")
    b = node(mount, f"{pool},pool_tls={folder}", "b")
    write(b, "first", b"x")
    gets(a, "first", b"x")
    until = a.status()["pool"]["certificate"]["until"]
    a.allow_log("kvfs cannot use the certificate of this node")
    shutil.copy(other / "cert.pem", mine)
    wait_for(lambda: news(a, "certificate refused"), "the files are read")
    found = a.status()["pool"]["certificate"]
    assert "key.pem is not the key of cert.pem" in found["problem"]
    assert found["until"] == until
    assert "key.pem is not the key" in dict(facts(a.status()["pool"]))["new certificate"]
    assert a.status()["pool"]["files_refused"]
    write(a, "second", b"y")
    gets(b, "second", b"y")
    write(b, "third", b"z")
    assert read(a.path / "third") == b"z"
    shutil.copy(folder / "cert.pem", mine)
    wait_for(lambda: renewed(a), "the files are right again")
    assert not a.status()["pool"]["certificate"]["problem"]


@contextmanager
def tls_index(folder: Path, port: int, files: Path) -> Iterator[None]:
    """An index with the certificate of a directory, which asks for one of the same authority."""
    index = start(
        *(folder, 0, "--tls-port", str(port), "--tls-auth-clients", "yes"),
        *("--tls-cert-file", str(files / "cert.pem"), "--tls-key-file", str(files / "key.pem")),
        *("--tls-ca-cert-file", str(files / "ca.pem")),
    )
    try:
        yield
    finally:
        index.kill()
        index.wait()


def test_index_with_another_authority_is_reached_after_the_renewal(
    tmp_path: Path, mount: Mount
) -> None:
    folder, new, port = authority(tmp_path / "tls"), authority(tmp_path / "new"), free_port()
    options = f"ram=64M,pool=rediss://127.0.0.1:{port}/kv,pool_address=127.0.0.1:{free_port()}"
    with tls_index(tmp_path / "first", port, authority(tmp_path / "i", signed_by=folder)):
        kv = mount(f"{options},pool_tls={folder}", "a")
        wait_for(lambda: index_is_up(kv), "the index answers")
    kv.allow_log("the pool's index is down")
    with tls_index(tmp_path / "second", port, authority(tmp_path / "j", signed_by=new)):
        wait_for(lambda: "certificate" in kv.status()["pool"]["index"]["why"], "it is refused")
        replace(folder, new)
        wait_for(lambda: index_is_up(kv), "the index answers again")


def test_password_is_read_again(tmp_path: Path, mount: Mount) -> None:
    port, secret = free_port(), tmp_path / "password"
    secret.write_text("old")
    secret.chmod(0o600)
    options = f"ram=64M,pool=redis://127.0.0.1:{port}/kv,pool_address=127.0.0.1:{free_port()}"
    with server(tmp_path / "redis", port, password="old"):  # noqa: S106 (of this test's server)
        kv = mount(f"{options},pool_credentials={secret}", "a")
        kv.allow_log("the pool's index is down")
        kv.allow_log("the password of the index stays as it was")
        command(port, "CONFIG", "SET", "requirepass", "new", password="old")  # noqa: S106
        command(port, "CLIENT", "KILL", "TYPE", "normal", password="new")  # noqa: S106
        wait_for(lambda: "WRONGPASS" in kv.status()["pool"]["index"]["why"], "it is refused")
        secret.chmod(0o644)
        wait_for(lambda: "has mode 0644" in password_problem(kv), "the file is not private")
        secret.write_text("new")
        secret.chmod(0o600)
        wait_for(lambda: index_is_up(kv), "the index takes the password")
        assert news(kv, "password renewed")
        assert not password_problem(kv)


def test_password_that_the_index_refuses_is_not_used_before_it_takes_it(
    tmp_path: Path, mount: Mount
) -> None:
    """An operator may write the file before the index knows the new password."""
    port, secret = free_port(), tmp_path / "password"
    secret.write_text("old")
    secret.chmod(0o600)
    options = f"ram=64M,pool=redis://127.0.0.1:{port}/kv,pool_address=127.0.0.1:{free_port()}"
    with server(tmp_path / "redis", port, password="old"):  # noqa: S106 (of this test's server)
        kv = mount(f"{options},pool_credentials={secret}", "a")
        kv.allow_log("the password of the index stays as it was")
        kv.allow_log("the pool's index is down")
        kv.allow_log("the pool learns later of changes here")
        wait_for(lambda: index_is_up(kv), "the index answers")
        secret.write_text("new")
        wait_for(lambda: "WRONGPASS" in password_problem(kv), "the index refuses it")
        assert kv.status()["pool"]["files_refused"]
        command(port, "CLIENT", "KILL", "TYPE", "normal", password="old")  # noqa: S106
        command(port, "ACL", "SETUSER", "default", ">new", password="old")  # noqa: S106
        wait_for(lambda: not password_problem(kv), "the index takes it")
        wait_for(lambda: index_is_up(kv), "the index answers")
        command(port, "ACL", "SETUSER", "default", "<old", password="new")  # noqa: S106
        command(port, "CLIENT", "KILL", "TYPE", "normal", password="new")  # noqa: S106
        write(kv, "block", b"x")
        assert index_is_up(kv)
        assert len(news(kv, "password refused")) == 1


def renewal(tmp_path: Path) -> Renewal:
    place = PoolPlace.parse("redis://127.0.0.1:1/kv")
    member = Membership(
        place=place,
        credentials=Credentials(),
        node="a",
        incarnation="b",
        address="127.0.0.1:1",
        folder=tmp_path,
        host="here",
        machine="m",
        mountpoint="/mnt/kv",
        tls=tmp_path,
    )
    return Renewal(member, Servers(place, Credentials()), News(), lambda: None)


@pytest.mark.parametrize(
    ("lasts", "left", "soon"),
    [
        (365 * DAY, 15 * DAY, False),
        (365 * DAY, 13 * DAY, True),
        (DAY, DAY / 4, False),
        (DAY, DAY / 6, True),
        (365 * DAY, -DAY, True),
    ],
)
def test_end_of_a_certificate_is_near_in_its_last_fifth_and_14_days(
    tmp_path: Path, lasts: float, left: float, *, soon: bool
) -> None:
    found, now = renewal(tmp_path), time.time()
    found.validity = Validity(now + left - lasts, now + left)
    assert found.ends_soon is soon


def test_end_of_a_certificate_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = authority(tmp_path / "tls")
    since, until = expect_match(folder)
    assert abs(time.time() - since) < 60
    assert abs(until - since - 2 * DAY) < 2
    found, told = renewal(folder), list[object]()
    found.news.on_event = lambda _, **said: told.append(said)

    async def case() -> None:
        await found.look()
        assert found.validity == (since, until)
        assert not told
        found.validity = Validity(since - DAY, time.time() + 60)
        await found.look()
        await found.look()
        assert told == [{"what": "certificate ends", "until": found.validity.until}]

    trio.run(case)
    assert "the certificate of this node ends at" in caplog.text


def test_movers_keep_their_certificate_while_new_files_do_not_fit(tmp_path: Path) -> None:
    """Cert and key load, but their authority has not signed them."""
    folder, other = authority(tmp_path / "tls"), authority(tmp_path / "other")
    first = context_of(str(folder))
    shutil.copy(other / "ca.pem", folder)
    assert context_of(str(folder)) is first
    for name in ("cert.pem", "key.pem"):
        shutil.copy(other / name, folder)
    second = context_of(str(folder))
    assert second is not first
    assert context_of(str(folder)) is second


def test_refused_files_are_tried_again(tmp_path: Path) -> None:
    """As a certificate that begins a moment later by the clock of this machine."""
    found, told, problems = renewal(authority(tmp_path / "tls")), list[object](), ["too early"] * 2
    found.news.on_event = lambda _, **said: told.append(said["what"])

    def reload() -> None:
        if problems:
            raise KvfsError(problems.pop())

    async def case() -> None:
        for _ in range(2):
            await found.look()
            assert found.certificate_problem == "too early"
            assert found.validity is None
        await found.look()

    found.reload = reload
    trio.run(case)
    assert found.validity is not None
    assert not found.certificate_problem
    assert told == ["certificate refused", "certificate renewed"]


def test_later_end_of_the_authority_does_not_count(tmp_path: Path) -> None:
    """An authority that ends before the certificate ends all it has signed."""
    folder = authority(tmp_path / "tls")
    before = expect_match(folder).until
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-key", str(folder / "ca.key"), "-days", "1"),
            *("-subj", "/CN=authority tls", "-out", str(folder / "ca.pem")),
        ],
        check=True,
        capture_output=True,
    )
    assert expect_match(folder).until < before - DAY / 2
