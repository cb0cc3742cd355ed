"""The check without a mount: what it refuses, and that it leaves no trace."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from kvfs import fsck
from kvfs.catalog import Catalog, Inode
from kvfs.catalog.keys import number_key
from kvfs.cli import main
from kvfs.core.check import Survey, check
from kvfs.errors import CatalogError, ConfigError, InUseError, TierError
from kvfs.tiers import NvmeTier
from tests.unit.formats import write_format1


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory that an unused mount leaves."""
    nvme = NvmeTier(tmp_path / "nvme", 0)
    Catalog(nvme.root / "catalog").close()
    nvme.close()
    return nvme.root


def run(directory: Path, *, repair: bool = False, hashes: bool = False) -> dict[str, Any]:
    answers: list[dict[str, Any]] = []
    fsck.run(directory, answers.append, repair=repair, hashes=hashes)
    found = [finding for answer in answers for finding in answer["findings"]]
    return answers[-1] | {"findings": found}


def facts(directory: Path) -> list[tuple[bytes, bytes]]:
    catalog = Catalog(directory / "catalog", read_only=True)
    try:
        return list(catalog.records(b"m"))
    finally:
        catalog.close()


def test_no_session_begins_and_nothing_is_written(directory: Path) -> None:
    before = facts(directory)
    answer = run(directory)
    assert [(finding["kind"], finding["path"]) for finding in answer["findings"]] == [
        ("directory", "/")  # there never was a mount that made the root
    ]
    assert answer["ended"]
    assert facts(directory) == before
    assert run(directory, repair=True)["findings"][0]["state"] == "repaired"
    assert run(directory)["findings"] == []
    assert dict(facts(directory)).keys() == {b"changes", b"format"}


def test_facts_that_make_no_sense_are_no_obstacle_to_their_repair(directory: Path) -> None:
    run(directory, repair=True)
    catalog = Catalog(directory / "catalog")
    with catalog.batch() as batch:
        for name in ("session", "suspect", "ram_epoch"):
            batch.set_fact(name, "nonsense")
    catalog.close()
    assert [finding["kind"] for finding in run(directory)["findings"]] == ["fact"] * 3
    run(directory, repair=True)
    assert run(directory)["findings"] == []


def test_a_locked_directory_says_by_whom(directory: Path) -> None:
    holder = NvmeTier(directory, 0)
    holder.write_holder("process 7, mounted on /mnt/kv")
    with pytest.raises(InUseError) as refused:
        run(directory)
    assert refused.value.holder == "process 7, mounted on /mnt/kv"
    result = CliRunner().invoke(main, ["fsck", str(directory)])
    assert result.exit_code == 2
    assert "kvfs fsck /mnt/kv" in result.stderr
    holder.close()
    assert run(directory)["ended"]


def test_a_counter_that_is_no_number_is_refused(directory: Path) -> None:
    catalog = Catalog(directory / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("next_id", "many")
    catalog.close()
    with pytest.raises(ConfigError, match="counts from 'many', expected a number"):
        run(directory)


def test_a_catalog_opened_for_reading_takes_no_change(directory: Path) -> None:
    catalog = Catalog(directory / "catalog", read_only=True)
    with pytest.raises(CatalogError, match="write failed"), catalog.batch() as batch:
        batch.set_fact("x", "y")
    catalog.close()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), CatalogError("read failed")])
def test_a_check_that_cannot_go_on_says_why(
    error: Exception, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(survey: Survey) -> None:
        assert not survey.live
        await trio.lowlevel.checkpoint()
        raise error

    monkeypatch.setattr(fsck, "check", fail)
    with pytest.raises(TierError, match=r"the check cannot go on: .*(output error|read failed)"):
        run(directory)
    result = CliRunner().invoke(main, ["fsck", str(directory)])
    assert result.exit_code == 8
    assert result.stderr.count("\n") == 1


def test_progress_of_a_check_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than once while it goes on, and the findings once each."""
    told: list[dict[str, Any]] = []
    real: Callable[[Survey], Any] = check

    async def slow(survey: Survey) -> None:
        await real(survey)
        while len(told) < 3:
            await trio.lowlevel.checkpoint()

    monkeypatch.setattr(fsck, "check", slow)
    monkeypatch.setattr(fsck, "TELL_PERIOD", 0.01)
    fsck.run(directory, told.append, repair=False, hashes=False)
    assert sum(len(answer["findings"]) for answer in told) == 1
    assert [answer["ended"] for answer in told[-2:]] == [False, True]


def test_a_catalog_with_a_spoilt_block_is_no_clean_one(tmp_path: Path) -> None:
    """RocksDB cannot say what was in it, and nothing is mended beside it."""
    nvme = NvmeTier(tmp_path / "nvme", 0)
    catalog = Catalog(nvme.root / "catalog")
    with catalog.batch() as batch:
        for ino in range(100, 5000):
            batch.put(Inode(ino, stat.S_IFIFO, 0, 0, links=((1, ino),)))
    catalog.database._db.flush()
    catalog.close()
    nvme.close()
    (table,) = (nvme.root / "catalog").glob("*.sst")
    with table.open("r+b") as file:
        file.seek(table.stat().st_size // 2)
        file.write(b"spoilt")
    before = table.read_bytes()
    for options in ([], ["--repair"]):
        result = CliRunner().invoke(main, ["fsck", *options, str(nvme.root)])
        assert result.exit_code == 8
        assert "scan failed: Corruption" in result.stderr
    assert table.read_bytes() == before


def test_a_catalog_of_format_1_is_in_order_and_stays_one(tmp_path: Path) -> None:
    nvme = NvmeTier(tmp_path / "nvme", 0)
    nvme.close()
    write_format1(nvme.root / "catalog", nvme.root)
    for options in ({}, {"hashes": True}, {"repair": True, "hashes": True}):
        answer = run(nvme.root, **options)
        assert answer["findings"] == []
        assert answer["notes"] == {"copies": 1, "unfinished": 1} | (
            {"verified": 1} if options else {"to_verify": 1}
        )
    assert (b"format", b"1") in facts(nvme.root)


@pytest.mark.parametrize(
    ("kind", "key", "value", "found"),
    [
        (b"n", number_key(1), b"nonsense", "settings"),
        (b"n", number_key(5), b"{}", "mark"),
        (b"r", number_key(5), b"", "mark"),
        (b"t", b"short", b"", "mark"),
        (b"p", number_key(5), b"", "mark"),
        (b"l", number_key(1), b"no zero", "record"),
    ],
)
def test_exit_codes_of_marks_that_make_no_sense(
    directory: Path, kind: bytes, key: bytes, value: bytes, found: str
) -> None:
    run(directory, repair=True)
    catalog = Catalog(directory / "catalog")
    catalog.commit([(kind + key, value)], sync=False)
    catalog.close()
    for options, code, state in (([], 4, "--repair"), (["--repair"], 1, "repaired")):
        result = CliRunner().invoke(main, ["fsck", *options, str(directory)])
        assert result.exit_code == code
        assert result.stdout.startswith(f"{found}: ")
        assert f"({state}: " in result.stdout
    assert CliRunner().invoke(main, ["fsck", str(directory)]).exit_code == 0


@pytest.mark.parametrize(
    ("fact", "options", "reason"),
    [
        (None, "", "was never mounted with s3="),
        (None, "s3=s3://bucket/p", "was never mounted with s3="),
        ("s3://bucket/p/", "s3=s3://bucket/q", "the objects of .* are in s3://bucket/p/"),
        ("s3://bucket/p/", "ram=1G", "ram does not say where a bucket is"),
    ],
)
def test_a_bucket_that_is_not_the_catalogs_is_refused(
    directory: Path, fact: str | None, options: str, reason: str
) -> None:
    if fact is not None:
        catalog = Catalog(directory / "catalog")
        with catalog.batch() as batch:
            batch.set_fact("bucket", fact)
        catalog.close()
    with pytest.raises(ConfigError, match=reason):
        fsck.run(
            *(directory, lambda _: None), repair=False, hashes=False, bucket=True, options=options
        )
