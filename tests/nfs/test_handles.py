"""File handles of NFS clients, which survive everything except the end of their object."""

import os
import random
import subprocess
from contextlib import ExitStack

import pytest

from scripts.libnfs import File
from tests.conftest import Mount
from tests.harness import KVFS, PATIENCE, Mounted, wait_for
from tests.nfs.conftest import Exported

MIB = 1 << 20


def becomes_stale(file: File, content: bytes) -> None:
    """Check that a handle means its file until the kernel has forgotten it, and is refused then."""

    def refused() -> bool:
        try:
            found = file.read(64)
        except OSError:  # libnfs calls each refusal of a read EFAULT
            return True
        assert found == content[:64]
        return False

    wait_for(refused, "the handle is refused")
    with pytest.raises(OSError, match=r"STALE|NOENT"):
        file.stat()


def upgrade(kv: Mounted) -> None:
    done = subprocess.run(
        [*KVFS, "upgrade", kv.path], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


def closed(kv: Mounted) -> None:
    """Wait until the server has closed the files that no client reads."""
    wait_for(lambda: kv.status()["open_handles"] == 0, "the server has closed its files")


def test_handles_outlive_daemons_and_servers(mount: Mount, exported: Exported) -> None:
    """Two clients, and objects in memory, on NVMe and being written."""
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=2G,allow_other")
    subprocess.run([*KVFS, "ns", "create", kv.path / "nvme", "media=nvme"], check=True)
    nfs = exported(kv)
    contents = random.Random(2)
    data = {name: contents.randbytes(2 * MIB) for name in ("a", "nvme/b", "c")}
    with ExitStack() as stack:
        one, two = (stack.enter_context(nfs.client()) for _ in range(2))
        for name, content in data.items():
            one.write(name, content)
        files = [(name, client.open(name)) for name in data for client in (one, two)]
        growing = one.open("w", os.O_WRONLY | os.O_CREAT)
        written = b""

        def check() -> None:
            nonlocal written
            for name, file in files:
                assert file.read() == data[name], name
            piece = contents.randbytes(MIB)
            growing.write(piece, len(written))
            written += piece
            assert two.read("w") == written

        check()
        kv.kill_daemon()
        check()
        upgrade(kv)
        check()
        nfs.kill()
        nfs.start()
        check()
        closed(kv)
        kv.kill_daemon()
        nfs.restart()
        check()


def test_handle_of_a_removed_file_is_stale_for_ever(mount: Mount, exported: Exported) -> None:
    """The file is unlinked, replaced, dropped, or of another file system at this path."""
    kv = mount("ram=32M,nvme={tmp}/nvme,nvme_size=32M,allow_other")
    nfs = exported(kv)
    with nfs.client() as client:
        for name in ("unlinked", "replaced", "dropped", "kept"):
            client.write(name, name.encode() * 1000)
        files = {name: client.open(name) for name in ("unlinked", "replaced", "dropped", "kept")}
        for name, file in files.items():
            assert file.read(4) == name.encode()[:4]
        closed(kv)
        (kv.path / "unlinked").unlink()
        (kv.path / "unlinked").write_bytes(b"another")
        (kv.path / "new").write_bytes(b"another")
        (kv.path / "new").rename(kv.path / "replaced")
        for name in ("unlinked", "replaced"):
            becomes_stale(files[name], name.encode() * 1000)
        assert client.read("unlinked") == client.read("replaced") == b"another"

        number = 0
        while (kv.path / "dropped").exists():  # asking through NFS would be a use
            (kv.path / f"filler{number}").write_bytes(bytes(4 * MIB))
            number += 1
        becomes_stale(files["dropped"], b"dropped" * 1000)
        (kv.path / "dropped").write_bytes(b"another")
        becomes_stale(files["dropped"], b"")
        (kv.path / "kept").write_bytes(b"kept" * 1000)
        kept = client.open("kept")

        nfs.stop()
        kv.remount()
        nfs.start()
        assert kept.read() == b"kept" * 1000
        nfs.stop()
        kv.remount(kv.options.replace("/nvme,", "/other,"))
        for name in files:
            (kv.path / name).write_bytes(b"another")
        nfs.start()
        for file in (*files.values(), kept):
            becomes_stale(file, b"")
