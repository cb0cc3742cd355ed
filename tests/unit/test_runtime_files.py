"""Files of the runtime directory, of exports and of the catalog's facts, damaged and read back."""

import uuid
from pathlib import Path

import pytest

from kvfs.catalog import Catalog
from kvfs.config import Config
from kvfs.core.ledger.sessions import ram_epoch
from kvfs.daemon import bucket
from kvfs.daemon.storage import MountStorage
from kvfs.errors import ConfigError
from kvfs.fuse import session
from kvfs.nfs.export import LOOPBACK, Export, networks
from kvfs.nfs.servers import Ganesha, KernelNfsServer
from kvfs.s3.transfer import Terms
from tests.unit.test_own_files import DAMAGES


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_takeover_does_not_guess_which_directory_was_served(tmp_path: Path, damage: str) -> None:
    config = Config(mountpoint=Path("/mnt/kv"), nvme=tmp_path / "nvme")
    directory = tmp_path / "runtime"
    directory.mkdir()
    DAMAGES[damage](directory / "nvme")
    storage = MountStorage(config, directory, None, takeover=True)
    with pytest.raises(ConfigError, match=f"{directory}/nvme .*: write there what {tmp_path}/nvme"):
        storage._open(lambda *_: None)
    assert not (tmp_path / "nvme").exists()


@pytest.mark.parametrize("damage", [*DAMAGES, "words", "wrong", "more"])
def test_of_damaged_notes_about_a_store_nothing_is_believed(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {"words": "{", "wrong": '{"part": "8M"}', "more": '{"part": 8, "whole": 9}'}
    noted = tmp_path / "bucket"
    assert bucket._terms_before(noted) is None
    if damage in texts:
        noted.write_text(texts[damage])
    else:
        DAMAGES[damage](noted)
    assert bucket._terms_before(noted) is None
    assert "the bucket is asked again, the note about it is damaged: " in caplog.text


def test_notes_about_a_store_of_a_version_before_are_believed(tmp_path: Path) -> None:
    noted = tmp_path / "bucket"
    noted.write_text('{"single": 5, "part": 8, "parallel": 2, "once_put": false}')
    assert bucket._terms_before(noted) == Terms(single=5, part=8, parallel=2, once_put=False)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_session_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "session"
    DAMAGES[damage](path)
    with pytest.raises(ConfigError, match=r"session file .* (does not fit|cannot be opened)"):
        session.open_file(path, Path("/mnt/kv"))


@pytest.mark.parametrize("text", ["x", "-1", "7 8", "\u00b2", "9" * 30])
def test_a_damaged_epoch_is_refused(tmp_path: Path, text: str) -> None:
    catalog = Catalog(tmp_path / "catalog")
    assert ram_epoch(catalog) == 0
    with catalog.batch() as batch:
        batch.set_fact("ram_epoch", text)
    with pytest.raises(ConfigError, match=r"its fact ram_epoch is .*, expected a number: run kvfs"):
        ram_epoch(catalog)
    with catalog.batch() as batch:
        batch.set_fact("ram_epoch", "7")
    assert ram_epoch(catalog) == 7
    catalog.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_number_of_a_process_is_that_of_no_server(tmp_path: Path, damage: str) -> None:
    server = Ganesha(Path("/mnt/kv"), run=tmp_path / "run", logs=tmp_path / "logs")
    server.folder.mkdir(parents=True)
    DAMAGES[damage](server.pid_file)
    assert server.pid() == 0


def test_a_file_of_exports_that_is_a_link_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "exportfs").write_text("#!/bin/sh\n")
    (tmp_path / "exportfs").chmod(0o755)
    (tmp_path / "filesystems").write_text("nodev\tnfsd\n")
    kernel = KernelNfsServer(Path("/mnt/kv"), folder=tmp_path / "exports.d", proc=tmp_path)
    kernel.file.parent.mkdir()
    kernel.file.symlink_to(tmp_path / "precious")
    export = Export(Path("/mnt/kv"), uuid.uuid4(), networks("--allow", LOOPBACK))
    with pytest.raises(ConfigError, match=f"{kernel.file} is lrwxrwxrwx, expected a file"):
        kernel.start(export)
    assert not (tmp_path / "precious").exists()
