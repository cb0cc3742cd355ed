"""A catalog on a disk that others have filled: it goes on, and what was committed stays."""

import errno
import os
from pathlib import Path

import pytest

from kvfs import failpoints, mounts
from kvfs.catalog import FORMAT, Catalog
from kvfs.catalog import database as module
from kvfs.errors import CatalogError

MIB = 1 << 20
VALUE = "x" * 10_000


@pytest.fixture
def disk(tmp_path: Path):  # type: ignore[no-untyped-def]  # noqa: ANN201 (a path, then its end)
    disk = tmp_path / "disk"
    disk.mkdir()
    mounts.mount("test", disk, "tmpfs", 0, f"size={64 * MIB}")
    try:
        yield disk
    finally:
        mounts.umount(disk, mounts.MNT_DETACH)


def fill(path: Path) -> None:
    with path.open("wb") as file:
        found = os.statvfs(path.parent)
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize)


def commit(catalog: Catalog, number: int) -> None:
    with catalog.batch() as batch:
        batch.set_fact(f"fact {number}", VALUE)


def test_a_full_disk_is_survived_and_nothing_committed_is_lost(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RECOVERY_PERIOD", 0.0)
    catalog = Catalog(disk / "catalog")
    commit(catalog, 0)
    fill(disk / "foreign")
    done = 1

    def go_on() -> None:
        nonlocal done
        for number in range(1, 3000):
            commit(catalog, number)
            done += 1

    with pytest.raises(CatalogError, match="No space left"):
        go_on()
    assert "opened anew" in caplog.text, "the ballast was used"
    assert done > 200, "and bought time"
    (disk / "foreign").unlink()
    for number in range(done, done + 10):
        commit(catalog, number)
    catalog.database.set_ballast()
    assert (disk / "catalog.ballast").stat().st_size == module.BALLAST
    catalog.close()
    catalog = Catalog(disk / "catalog")
    assert all(catalog.fact(f"fact {number}") == VALUE for number in range(done + 10))
    catalog.close()


def test_an_error_that_went_away_is_survived(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RECOVERY_PERIOD", 0.0)
    catalog = Catalog(disk / "catalog")
    commit(catalog, 0)
    failpoints.arm(
        "catalog.commit=raise:EIO@1;catalog.commit=raise:EIO@2;catalog.commit=raise:EIO@3"
    )
    try:
        with pytest.raises(CatalogError, match="Input/output"):
            commit(catalog, 1)
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", sick)
            with pytest.raises(CatalogError, match="its disk takes none"):
                commit(catalog, 1)
        assert catalog.fact("fact 0") == VALUE, "it is read as before"
        assert "opened anew" not in caplog.text
        commit(catalog, 1)
    finally:
        failpoints.arm("")
    assert "opened anew" in caplog.text
    assert (catalog.fact("fact 0"), catalog.fact("fact 1")) == (VALUE, VALUE)
    catalog.close()


def sick(_: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_many_failures_do_not_each_reopen_the_catalog(disk: Path) -> None:
    catalog = Catalog(disk / "catalog")
    fill(disk / "foreign")
    failures = 0
    for number in range(3000):
        try:
            commit(catalog, number)
        except CatalogError:
            failures += 1
    assert failures > 100
    assert catalog.fact("format") == str(FORMAT), "it can still be read"
