"""A mount as an NFS client sees it: the same files, with the same names and bytes."""

import errno
import os
import random

import pytest

from scripts.nfs_server import Server
from tests.harness import Mounted, wait_for

MIB = 1 << 20


@pytest.fixture(params=[3, 4], ids=["v3", "v4"])
def version(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def test_files_are_written_read_renamed_and_removed(kv: Mounted, nfs: Server, version: int) -> None:
    data = random.Random(1).randbytes(5 * MIB + 17)
    with nfs.client(version) as client:
        client.mkdir("d")
        client.write("d/x.tmp", data)
        client.rename("d/x.tmp", "d/x")
        assert client.read("d/x") == data
        assert (kv.path / "d" / "x").read_bytes() == data
        assert client.stat("d/x").st_ino == (kv.path / "d" / "x").stat().st_ino
        assert not client.exists("d/x.tmp")
        with pytest.raises(OSError, match="NOENT") as refused:
            client.open("d/none")
        assert refused.value.errno == errno.ENOENT
        client.unlink("d/x")
        assert os.listdir(kv.path / "d") == []
        client.rmdir("d")
    assert os.listdir(kv.path) == []


def test_file_of_a_client_is_sealed_when_the_server_closes_it(
    kv: Mounted, nfs: Server, version: int
) -> None:
    """NFSv3 has no close: the server closes the file itself."""
    with nfs.client(version) as client:
        client.write("x", b"x" * MIB)
        wait_for(lambda: kv.counter("sealed") == 1, "it is sealed")
        wait_for(lambda: kv.status()["open_handles"] == 0, "nobody has it open")
        kv.check_accounts()


def test_clients_see_changes_on_the_mount_at_once(kv: Mounted, nfs: Server, version: int) -> None:
    """Connectors on the server write to a temporary name, and rename it to the final one."""
    (kv.path / "x").write_bytes(b"old")
    with nfs.client(version) as client:
        assert client.read("x") == b"old"
        assert not client.exists("y")
        (kv.path / "y.tmp").write_bytes(b"")
        assert {entry.name for entry in client.listdir()} >= {b"x", b"y.tmp"}
        for number in range(20):
            data = bytes([number]) * (1000 + number)
            (kv.path / "y.tmp").write_bytes(data)
            (kv.path / "y.tmp").rename(kv.path / "y")
            assert client.read("y") == data
            (kv.path / "y").rename(kv.path / "x")
            assert client.read("x") == data
            assert not client.exists("y")
