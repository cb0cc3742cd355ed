"""`kvfs export`: its refusals, the users of its clients, and its start and end."""

import errno
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.nfs.servers import Ganesha
from scripts.libnfs import Client
from scripts.nfs_server import forget
from scripts.s3_server import free_ports
from tests.conftest import Mount
from tests.harness import KVFS, PATIENCE, Mounted, alive, wait_for

Done = subprocess.CompletedProcess[str]


def run(*words: str | Path, **environment: str) -> Done:
    return subprocess.run(
        [*KVFS, "export", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def refused(*words: str | Path, **environment: str) -> str:
    done = run(*words, **environment)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("kvfs: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture
def started(kv: Mounted) -> Iterator[Callable[..., Client]]:
    """`started(*options)` exports the mount anew; returns a client that is root there."""
    port = free_ports()
    clients: list[Client] = []

    def start(*options: str) -> Client:
        while clients:
            clients.pop().close()
        if Ganesha(kv.path).pid():
            assert run("--stop", kv.path).returncode == 0
        done = run("--start", "--port", str(port), *options, kv.path)
        assert done.returncode == 0, done.stderr
        clients.append(Client(port, kv.path, version=4))
        return clients[-1]

    yield start
    for client in clients:
        client.close()
    if Ganesha(kv.path).pid():
        assert run("--stop", kv.path).returncode == 0
    forget(kv.path)


def test_export_of_other_and_private_paths_is_refused(mount: Mount, tmp_path: Path) -> None:
    assert "is not a mount point" in refused(tmp_path)
    private = mount("ram=64M", "private")
    assert "mount it with -o allow_other" in refused(private.path)


def test_wrong_networks_are_refused(kv: Mounted) -> None:
    assert "has host bits set" in refused("--allow", "10.0.0.1/8", kv.path)
    assert "expected an address or a network" in refused("--allow", "everybody", kv.path)
    outside = ("--allow", "10.0.0.0/8", "--no-root-squash", "11.0.0.0/8")
    assert "expected a network within those of --allow" in refused(*outside, kv.path)
    assert "expected UID:GID" in refused("--all-as", "nobody", kv.path)
    both = ("--all-as", "1:1", "--no-root-squash", "127.0.0.1")
    assert "contradicts" in refused(*both, kv.path)
    assert "expected two different ports" in refused("--v3", "--mountd-port", "2049", kv.path)
    assert "expected an address" in refused("--listen", "here", kv.path)
    assert "exclude each other" in refused("--start", "--stop", kv.path)
    assert "exclude each other" in refused("--ganesha", "--knfsd", kv.path)
    assert "nothing to stop" in refused("--stop", kv.path)
    assert "No such file or directory" in refused("-o", kv.path / "none" / "x", kv.path)


def test_failed_start_names_the_obstacle(kv: Mounted, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = refused("--start", "--port", port, kv.path)
        assert f"by {Path('/proc/self/comm').read_text().strip()} ({os.getpid()})" in told
    assert not Ganesha(kv.path).folder.exists(), "a start that fails leaves nothing either"
    told = refused("--start", kv.path, PATH=str(tmp_path))
    assert "apt-get install nfs-ganesha nfs-ganesha-vfs" in told
    forget(kv.path)


def test_started_twice_stopped_and_started_anew(
    kv: Mounted, started: Callable[..., Client]
) -> None:
    started().close()
    ganesha = Ganesha(kv.path)
    first = ganesha.pid()
    port = ganesha.config.read_text().partition("NFS_Port = ")[2].partition(";")[0]
    again = run("--start", "--port", port, kv.path)
    assert again.returncode == 0
    assert f"is exported already at 127.0.0.1:{port}" in again.stdout
    assert "is exported already, with other options" in refused("--start", "--read-only", kv.path)
    assert ganesha.pid() == first
    busy = subprocess.run([*KVFS, "umount", kv.path], capture_output=True, text=True, check=False)
    assert f"in use by ganesha.nfsd ({first}): kvfs export --stop {kv.path}; or" in busy.stderr
    assert run("--stop", kv.path).returncode == 0
    assert not alive(first)
    assert not ganesha.pid()
    assert not ganesha.folder.exists(), "nothing is left of it but its log"
    assert ganesha.log.exists()


def test_a_server_that_died_is_not_running_any_more(
    kv: Mounted, started: Callable[..., Client]
) -> None:
    started().close()
    pid = Ganesha(kv.path).pid()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(pid), "it is dead")
    done = run("--stop", kv.path)
    assert done.returncode == 0
    assert "was no longer exported" in done.stdout
    assert not Ganesha(kv.path).folder.exists()
    assert "nothing to stop" in refused("--stop", kv.path)


def test_a_mount_that_was_detached_names_the_export_that_holds_it(
    kv: Mounted, started: Callable[..., Client]
) -> None:
    started().close()
    keeper = kv.keeper
    subprocess.run([*KVFS, "umount", "--lazy", kv.path], check=True)
    done = subprocess.run(
        [*KVFS, "mount", kv.path, "-o", "ram=64M"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"(process {keeper})" in done.stderr
    assert f"until the export ends; end it first: kvfs export --stop {kv.path}" in done.stderr
    assert run("--stop", kv.path).returncode == 0
    wait_for(lambda: not alive(keeper), "it ends")
    assert not Ganesha(kv.path).folder.exists(), "also where the mount went before it"
    kv.mount()


def test_a_configuration_is_printed_or_written(kv: Mounted, tmp_path: Path) -> None:
    printed = run("--allow", "10.1.0.0/16", kv.path)
    assert "        Clients = 10.1.0.0/16;\n" in printed.stdout
    file = tmp_path / "exports"
    assert run("--knfsd", "--allow", "10.1.0.0/16", "-o", file, kv.path).returncode == 0
    identity = kv.status()["identity"]
    assert file.read_text() == (
        f'"{kv.path}" 10.1.0.0/16(rw,sync,no_subtree_check,fsid={identity},root_squash,'
        "anonuid=65534,anongid=65534)\n"
    )
    kv.remount()
    assert run("--allow", "10.1.0.0/16", kv.path).stdout == printed.stdout
    assert run("-o", file, kv.path).returncode == 0, "kvfs wrote it"
    assert run("--knfsd", "-o", file, kv.path).returncode == 0, "and again"
    file.write_text("/home *(ro)\n")
    assert "kvfs export did not write it" in refused("-o", file, kv.path)
    assert file.read_text() == "/home *(ro)\n"


def test_clients_act_as_the_users_of_the_export_options(
    kv: Mounted, started: Callable[..., Client]
) -> None:
    (kv.path / "open").mkdir()
    (kv.path / "open").chmod(0o777)

    def owner(client: Client, name: str) -> int:
        client.write(f"open/{name}", b"x")
        return (kv.path / "open" / name).stat().st_uid

    root = started()
    assert owner(root, "a") == 65534
    with pytest.raises(OSError, match="ACCES"):
        root.write("b", b"x")
    assert owner(started("--no-root-squash", "127.0.0.1"), "c") == 0
    assert owner(started("--all-as", "1234:1234"), "d") == 1234
    reader = started("--read-only")
    assert reader.read("open/a") == b"x"
    with pytest.raises(OSError, match="ROFS") as wrong:
        reader.write("open/e", b"x")
    assert wrong.value.errno == errno.EROFS
    with pytest.raises(OSError, match="nfs_mount"):  # loopback is 127.0.0.1 here
        started("--allow", "10.0.0.0/8", "--listen", "127.0.0.1")
