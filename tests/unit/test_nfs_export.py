"""The configuration of NFS servers, without a server."""

import os
import uuid
from pathlib import Path

import pytest

from kvfs.errors import ConfigError, KvfsError
from kvfs.nfs.export import Export, NfsServer, networks
from kvfs.nfs.servers import KernelNfsServer

PATH = Path("/mnt/kv")
FSID = uuid.UUID("12345678-1234-5678-1234-567812345678")


def told(*allow: str) -> str:
    export = Export(PATH, FSID, networks("--allow", allow))
    return export.ganesha(NfsServer("127.0.0.1", 2049, 0, Path("/run/x")))


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("192.0.2.7", "192.0.2.7"),
        ("::1", "::1"),
        ("fd00::/64", "fd00::/64"),
        ("0.0.0.0/0", "0.0.0.0/1, 128.0.0.0/1"),
        ("::/0", "::/1, 8000::/1"),
    ],
)
def test_networks_are_written_as_its_parser_takes_them(network: str, words: str) -> None:
    assert f"Clients = {words};" in told(network)


def test_a_prefix_that_it_cannot_be_told_is_refused() -> None:
    with pytest.raises(ConfigError, match="a prefix up to /99"):
        told("fd00::/100")


def test_backslashes_of_escaped_names_are_escaped() -> None:
    server = NfsServer("127.0.0.1", 2049, 0, Path("/run/kvfs-nfs/a\\x2db"))
    export = Export(PATH, FSID, networks("--allow", ["127.0.0.1"]))
    assert 'RecoveryRoot = "/run/kvfs-nfs/a\\\\x2db";' in export.ganesha(server)
    with pytest.raises(ConfigError, match="without quotes"):
        Export(Path('/mnt/"kv"'), FSID, ())


def test_the_root_of_some_clients_stays_root() -> None:
    allow = networks("--allow", ["10.0.0.0/8"])
    export = Export(PATH, FSID, allow, networks("--no-root-squash", ["10.1.0.0/16"]))
    line = export.line()
    assert line.startswith('"/mnt/kv" 10.1.0.0/16(')
    assert "no_root_squash) 10.0.0.0/8(" in line
    assert line.endswith("root_squash,anonuid=65534,anongid=65534)\n")
    text = export.ganesha(NfsServer("127.0.0.1", 2049, 0, Path("/run/x")))
    assert text.index("Squash = No_Root_Squash") < text.index("Clients = 10.0.0.0/8;")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelNfsServer:
    """With an exportfs that notes what it is told, and fails if there is a file `broken`."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "exportfs"
    program.write_text(
        f'#!/bin/sh\necho "$@" $(ls {tmp_path}/exports.d) >>{tmp_path}/told\n'
        f"[ ! -e {tmp_path}/broken ] || {{ echo no such thing >&2; exit 1; }}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "filesystems").write_text("nodev\tnfsd\n")
    return KernelNfsServer(PATH, folder=tmp_path / "exports.d", proc=tmp_path)


def test_the_kernels_server_reads_a_file_of_its_own(
    kernel: KernelNfsServer, tmp_path: Path
) -> None:
    export = Export(PATH, FSID, networks("--allow", ["10.0.0.0/8"]))
    assert kernel.start(export)
    assert kernel.file.read_text() == export.line()
    assert not kernel.start(export)
    with pytest.raises(ConfigError, match="already, with other options"):
        kernel.start(Export(PATH, FSID, networks("--allow", ["10.1.0.0/16"])))
    kernel.stop()
    assert (tmp_path / "told").read_text() == "-ra kvfs-mnt-kv.exports\n-ra\n"
    with pytest.raises(ConfigError, match="is not exported"):
        kernel.stop()


def test_a_kernel_that_takes_no_export_keeps_none(kernel: KernelNfsServer, tmp_path: Path) -> None:
    export = Export(PATH, FSID, networks("--allow", ["10.0.0.0/8"]))
    (tmp_path / "broken").touch()
    with pytest.raises(KvfsError, match="exportfs -ra failed: no such thing"):
        kernel.start(export)
    assert not kernel.file.exists()
    (tmp_path / "filesystems").write_text("nodev\ttmpfs\n")
    with pytest.raises(ConfigError, match="this kernel has no NFS server"):
        kernel.start(export)
    assert not kernel.file.exists()
