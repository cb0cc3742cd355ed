"""The catalog's journal has what a damaged log lacks; of a damaged journal nothing is trusted."""

import errno
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest

from kvfs import failpoints
from kvfs.catalog import Catalog, journal
from kvfs.catalog.journal import Changes, Journal
from kvfs.errors import CatalogError, ConfigError

COUNT = 300
SEEDS = range(40)


def commit(catalog: Catalog, *numbers: int) -> None:
    for number in numbers:
        with catalog.batch() as batch:
            batch.set_fact(f"fact {number}", "x" * number)


def killed(tmp_path: Path, count: int = COUNT) -> Path:
    """A catalog as `kill -9` leaves it; nothing of its changes is in a table."""
    living = tmp_path / "living"
    living.mkdir()
    catalog = Catalog(living / "catalog")
    commit(catalog, *range(count))
    dead = tmp_path / "dead"
    shutil.copytree(living, dead)
    catalog.close()
    return dead / "catalog"


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file grows beyond it, as on a full disk: pytest's own output neither, so it is short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def the_log(path: Path) -> Path:
    return max(path.glob("*.log"), key=lambda log: log.stat().st_size)


def flip(path: Path, seed: int, count: int = 3) -> None:
    print("seed", seed)
    chance, data = random.Random(seed), bytearray(path.read_bytes())
    for _ in range(count):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def segments(path: Path) -> list[Path]:
    return sorted(path.with_name("catalog.journal").iterdir())


def known(catalog: Catalog) -> list[int]:
    return [number for number in range(COUNT) if catalog.fact(f"fact {number}") == "x" * number]


# Changes that a damaged log lacks


@pytest.mark.parametrize("damage", ["flipped", "cut", "deleted"])
def test_changes_missing_in_a_damaged_log_come_from_the_journal(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = killed(tmp_path)
    log = the_log(path)
    if damage == "flipped":
        flip(log, 1)
    elif damage == "cut":
        cut(log)
    else:
        log.unlink()
    catalog = Catalog(path)
    assert catalog.recovered.taken > COUNT // 8
    assert known(catalog) == [*range(COUNT)]
    assert not catalog.doubt
    assert (
        f"the {catalog.recovered.taken} changes after it are taken from the journal" in caplog.text
    )
    catalog.close()
    again = Catalog(path)
    assert known(again) == [*range(COUNT)]
    assert not again.recovered.taken
    again.close()


def test_a_whole_log_is_believed_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = Catalog(killed(tmp_path))
    assert known(catalog) == [*range(COUNT)]
    assert not caplog.text
    catalog.close()


def test_erased_records_do_not_come_back_from_the_journal(tmp_path: Path) -> None:
    """The journal has what was taken away as well, in its order."""
    living = tmp_path / "living"
    living.mkdir()
    catalog = Catalog(living / "catalog")
    commit(catalog, 7)
    with catalog.batch() as batch:
        batch.erase(b"m", b"fact 7")
    shutil.copytree(living, tmp_path / "dead")
    catalog.close()
    the_log(tmp_path / "dead/catalog").unlink()
    catalog = Catalog(tmp_path / "dead/catalog")
    assert catalog.recovered.taken
    assert catalog.fact("fact 7") is None
    catalog.close()


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    path = killed(tmp_path)
    cut(the_log(path))
    before = {file: file.read_bytes() for file in segments(path)}
    catalog = Catalog(path, read_only=True)
    missing = catalog.recovered.taken
    assert known(catalog) == [*range(COUNT)][: len(known(catalog))]
    assert len(known(catalog)) == COUNT - missing
    catalog.close()
    assert {file: file.read_bytes() for file in segments(path)} == before


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_damage_of_log_and_journal_loses_only_the_common_part(tmp_path: Path, seed: int) -> None:
    """The log has all up to its damage; the journal is asked for the rest only."""
    path = killed(tmp_path)
    (segment,) = segments(path)
    flip(segment, seed, 1)
    chance = random.Random(seed)
    os.truncate(the_log(path), chance.randrange(the_log(path).stat().st_size))
    catalog = Catalog(path)
    found = known(catalog)
    assert found == [*range(len(found))], "a beginning of all changes"
    assert (len(found) < COUNT) == bool(catalog.doubt)
    catalog.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_ends_that_both_lack_are_lost_but_not_in_silence(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    path, chance = killed(tmp_path), random.Random(seed)
    for file in (the_log(path), *segments(path)):
        os.truncate(file, chance.randrange(file.stat().st_size))
    catalog = Catalog(path)
    found = known(catalog)
    assert found == [*range(len(found))], "a beginning of all changes"
    assert catalog.doubt
    catalog.close()


# Lost changes


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cleared"])
def test_a_session_that_is_lost_with_its_journal_is_not_taken_for_the_one_before(
    tmp_path: Path, damage: str
) -> None:
    """That one ended as it should, and its log is in tables."""
    living, dead = tmp_path / "living", tmp_path / "dead"
    living.mkdir()
    catalog = Catalog(living / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("session", "1")
        batch.set_fact("clean", "1")
    catalog.close()
    catalog = Catalog(living / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("session", "2")
    commit(catalog, *range(9))
    shutil.copytree(living, dead)
    catalog.close()
    for log in (dead / "catalog").glob("*.log"):
        log.unlink()
    (segment,) = segments(dead / "catalog")
    if damage == "emptied":
        os.truncate(segment, 0)
    elif damage == "cleared":
        segment.unlink()
    else:
        shutil.rmtree(segment.parent)
    catalog = Catalog(dead / "catalog")
    assert not known(catalog)
    assert "changes after change" in catalog.doubt
    catalog.close()


def test_a_death_between_the_writes_of_a_change_leaves_no_doubt(tmp_path: Path) -> None:
    path = killed(tmp_path)
    (segment,) = segments(path)
    data = segment.read_bytes()
    segment.write_bytes(data[: data.rindex(b"kvj1")])
    catalog = Catalog(path)
    assert not catalog.doubt
    assert known(catalog) == [*range(COUNT)]
    catalog.close()


def test_a_death_while_the_journal_cannot_be_written_leaves_no_doubt(tmp_path: Path) -> None:
    """A full disk takes none of it, while RocksDB has room that it took before."""
    living, dead = tmp_path / "living", tmp_path / "dead"
    living.mkdir()
    catalog = Catalog(living / "catalog")
    commit(catalog, 1)
    os.close(catalog.database.journal._fd)
    catalog.database.journal._fd = os.open("/dev/full", os.O_WRONLY)
    commit(catalog, *range(2, 9))
    shutil.copytree(living, dead)
    catalog.close()
    catalog = Catalog(dead / "catalog")
    assert known(catalog) == [*range(1, 9)]
    assert not catalog.doubt
    catalog.close()


def test_an_empty_segment_after_a_power_loss_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not reached the disk, but what the catalog synced has."""
    living, dead = tmp_path / "living", tmp_path / "dead"
    living.mkdir()
    catalog = Catalog(living / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("boot", catalog.database.journal.where)
    commit(catalog, *range(9))
    shutil.copytree(living, dead)
    catalog.close()
    (segment,) = segments(dead / "catalog")
    os.truncate(segment, 0)
    monkeypatch.setattr("kvfs.runtime.boot_id", lambda: "another")
    catalog = Catalog(dead / "catalog")
    assert known(catalog) == [*range(9)]
    assert not catalog.doubt
    catalog.close()


def test_catalog_without_its_journal_is_in_doubt_until_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = killed(tmp_path)
    with_session(path)
    for log in path.glob("*.log"):
        log.unlink()
    shutil.rmtree(path.with_name("catalog.journal"))
    catalog = Catalog(path)
    assert "its journal is gone" in catalog.doubt
    assert "names may be missing" in caplog.text
    catalog.close()
    catalog = Catalog(path)
    assert "its journal is gone" in catalog.doubt, "at the next mount as well"
    catalog.believe()
    catalog.close()
    catalog = Catalog(path)
    assert not catalog.doubt
    catalog.close()


def test_a_catalog_that_lost_all_of_its_logs_does_not_look_like_a_new_one(tmp_path: Path) -> None:
    path = killed(tmp_path)
    the_log(path).unlink()
    shutil.rmtree(path.with_name("catalog.journal"))
    catalog = Catalog(path)
    assert "its journal is gone" in catalog.doubt
    catalog.close()


def with_session(path: Path) -> None:
    """A session began in it, which did not end."""
    catalog = Catalog(path)
    with catalog.batch() as batch:
        batch.set_fact("session", "1")
    catalog.database._db.flush()
    commit(catalog, 1)
    dead = path.parent.parent / "again"
    shutil.copytree(path.parent, dead)
    catalog.close()
    shutil.rmtree(path.parent)
    dead.rename(path.parent)


def test_numbers_of_inodes_that_are_lost_are_not_given_out_again(tmp_path: Path) -> None:
    living = tmp_path / "living"
    living.mkdir()
    catalog = Catalog(living / "catalog", first_id=16)
    given = catalog.next_id()
    commit(catalog, *range(9))
    shutil.copytree(living, tmp_path / "dead")
    catalog.close()
    path = tmp_path / "dead/catalog"
    (segment,) = segments(path)
    the_log(path).unlink()
    data = bytearray(segment.read_bytes())
    data[len(data) // 3] ^= 1
    segment.write_bytes(data)
    catalog = Catalog(path, first_id=16)
    assert catalog.doubt
    assert catalog.next_id() > given
    catalog.close()


def test_loss_by_a_machine_crash_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = killed(tmp_path)
    the_log(path).unlink()
    (segment,) = segments(path)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    monkeypatch.setattr("kvfs.runtime.boot_id", lambda: "another")
    catalog = Catalog(path)
    assert not catalog.doubt
    assert "did not reach the disk before the machine went down" in caplog.text
    assert known(catalog) == [*range(len(known(catalog)))]
    catalog.close()


def test_a_catalog_of_before_there_were_journals_is_opened_as_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "catalog"
    catalog = Catalog(path)
    commit(catalog, *range(COUNT))
    with catalog.batch() as batch:
        batch.erase(b"m", b"nothing")
    catalog.database._db.delete(b"mchanges")  # as an older kvfs has left it
    catalog.close()
    shutil.rmtree(path.with_name("catalog.journal"))
    catalog = Catalog(path)
    assert known(catalog) == [*range(COUNT)]
    assert not caplog.text
    catalog.close()


# The journal itself


def some_changes(chance: random.Random) -> Changes:
    return [
        (chance.randbytes(chance.randrange(30)), chance.choice([None, b"", chance.randbytes(200)]))
        for _ in range(chance.randrange(8))
    ]


def written(tmp_path: Path, chance: random.Random, count: int = 50) -> dict[int, Changes]:
    """A journal of so many changes, and what is in it by number."""
    made = Journal(tmp_path / "journal", tmp_path, "here")
    made.begin(0)
    changes = {number: some_changes(chance) for number in range(1, count + 1)}
    for number, some in changes.items():
        made.append(number, some)
    made.close()
    return changes


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_journal_yields_written_changes_only(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    changes = written(tmp_path, chance)
    (segment,) = (tmp_path / "journal").iterdir()
    data = segment.read_bytes()
    how = seed % 4
    if how == 0:
        flip(segment, seed, chance.randrange(1, 20))
    elif how == 1:
        os.truncate(segment, chance.randrange(len(data)))
    elif how == 2:
        at = chance.randrange(len(data))
        segment.write_bytes(data[:at] + chance.randbytes(chance.randrange(1, 99)) + data[at:])
    else:
        at = chance.randrange(len(data))
        segment.write_bytes(data[:at] + data[at + chance.randrange(1, 999) :])
    found = journal.read(tmp_path / "journal", 0)
    assert found is not None
    assert found.where in {"here", ""}
    for number, body in found.records.items():
        assert journal.unpacked(body) == changes[number]
    assert len(found.records) >= len(changes) // 10 or how == 1


def test_journal_reads_only_changes_after_a_number(tmp_path: Path) -> None:
    changes = written(tmp_path, random.Random(2))
    found = journal.read(tmp_path / "journal", 47)
    assert found is not None
    assert sorted(found.records) == [48, 49, 50]
    assert found.end == len(changes)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x01",
        b"\xff" * 8,
        msgpack.packb([(b"key", b"value")])[:-1],
        msgpack.packb([(b"key", "value")]),
        msgpack.packb([b"key"]),
        msgpack.packb(7),
    ],
)
def test_a_record_that_makes_no_sense_is_none(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"a record of \d+ bytes has"):
        journal.unpacked(body)


def test_journal_drops_changes_that_the_tables_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT", 20_000)
    path = tmp_path / "catalog"
    catalog = Catalog(path)
    commit(catalog, *range(COUNT))
    before = len(segments(path))
    assert before > 1, "no table has them yet"
    catalog.database._db.flush()
    commit(catalog, *range(COUNT))
    catalog.close()
    catalog = Catalog(path)
    assert len(segments(path)) == 1
    assert known(catalog) == [*range(COUNT)]
    catalog.close()


def test_many_segments_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SEGMENT", 5_000)
    path = killed(tmp_path)
    assert len(segments(path)) > 5
    the_log(path).unlink()
    catalog = Catalog(path)
    assert known(catalog) == [*range(COUNT)]
    catalog.close()


def test_unwritable_journal_fails_no_commit_and_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "catalog"
    catalog = Catalog(path)
    os.close(catalog.database.journal._fd)
    catalog.database.journal._fd = os.open("/dev/full", os.O_WRONLY)
    commit(catalog, 1, 2)
    assert catalog.database.journal.why
    assert caplog.text.count("its journal is not written") == 1
    monkeypatch.setattr(journal, "RETRY", 0.0)
    commit(catalog, 3)
    assert not catalog.database.journal.why
    assert [int(one.name, 16) for one in segments(path)][-1] > 2
    catalog.close()
    catalog = Catalog(path)
    assert [catalog.fact(f"fact {number}") for number in (1, 2, 3)] == ["x", "xx", "xxx"]
    assert not catalog.doubt
    catalog.close()


def test_partly_written_record_gives_the_reason(tmp_path: Path) -> None:
    made = Journal(tmp_path / "journal", tmp_path, "here")
    made.begin(0)
    with file_size_limit(made._size + 20):
        made.append(1, [(b"key", b"x" * 100)])
    assert os.strerror(errno.EFBIG) in made.why
    assert made._current.stat().st_size == made._size, "no part of a record looks like damage"
    made.close()


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir, sparse], ids=["pipe", "directory", "huge"])
def test_foreign_segment_is_neither_awaited_nor_read(
    tmp_path: Path, kind: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = killed(tmp_path)
    catalog = Catalog(path)
    catalog.close()
    kind(path.with_name("catalog.journal") / f"{1 << 20:016x}")
    catalog = Catalog(path)
    assert catalog.doubt
    assert known(catalog) == [*range(COUNT)]
    assert f"catalog.journal/{1 << 20:016x} " in caplog.text
    catalog.close()


def test_other_names_are_no_segments(tmp_path: Path) -> None:
    path = killed(tmp_path)
    for name in ("ffffffffffffffff", "new", "0x7", "-1", "notes"):
        os.mkfifo(path.with_name("catalog.journal") / name)
    catalog = Catalog(path)
    assert not catalog.doubt
    commit(catalog, 7)
    assert not catalog.database.journal.why
    catalog.close()


def test_a_pipe_in_the_place_of_the_ballast_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "catalog.ballast")
    with pytest.raises(ConfigError, match=r"catalog\.ballast is prw.*, expected .*: remove it"):
        Catalog(tmp_path / "catalog")


def test_a_change_that_was_refused_is_not_in_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "catalog"
    catalog = Catalog(path)
    commit(catalog, 1)
    failpoints.arm("catalog.commit=raise:EIO@1")
    try:
        with pytest.raises(CatalogError):
            commit(catalog, 2)
    finally:
        failpoints.arm("")
    found = journal.read(path.with_name("catalog.journal"), 0)
    assert found is not None
    assert not any(b"fact 2" in body for body in found.records.values())
    catalog.close()


# Tables


def test_a_damaged_table_is_a_refusal_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "catalog"
    catalog = Catalog(path)
    commit(catalog, *range(COUNT))
    catalog.close()
    for table in path.glob("*.sst"):
        data = bytearray(table.read_bytes())
        for at in range(0, len(data) * 9 // 10, 1000):
            data[at] ^= 255
        table.write_bytes(data)
    with pytest.raises((ConfigError, CatalogError), match="Corruption") as refused:  # noqa: PT012
        catalog = Catalog(path)
        catalog.database.look_through(1.0)
    assert "\n" not in str(refused.value)
