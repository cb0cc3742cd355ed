"""RocksDB as kvfs uses it: batches, numbers, scans, and what is refused."""

import logging
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs import failpoints
from kvfs.catalog import FORMAT, Catalog, Dentry, Inode, PackedCopy, Stored, audit, keys
from kvfs.catalog import catalog as module
from kvfs.catalog.inode import ROOT_INO, SPARSE
from kvfs.errors import CatalogError, ConfigError

HOSTILE = [b"\x00", b"\x01", b"a", b"a\xff", b"b", b"\xfe\xff", b"\xff", b"\xff\xff", b"\xff" * 255]
EDGES = [1, 2, 255, 256, (1 << 32) - 1, 1 << 56, (1 << 63) - 1]  # inode numbers around carries


def test_a_catalog_that_has_lost_its_begin_is_not_begun_anew(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c")
    with catalog.batch() as batch:
        batch.set_fact("some", "thing")
    catalog.close()
    files = sorted((tmp_path / "c").iterdir())
    (tmp_path / "c" / "CURRENT").rename(tmp_path / "CURRENT")
    for _ in range(2):
        with pytest.raises(ConfigError, match="has lost its file CURRENT"):
            Catalog(tmp_path / "c")
    (tmp_path / "CURRENT").rename(tmp_path / "c" / "CURRENT")
    assert sorted((tmp_path / "c").iterdir()) == files
    catalog = Catalog(tmp_path / "c")
    assert catalog.fact("some") == "thing"
    catalog.close()


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog(tmp_path / "catalog")
    yield opened
    opened.close()


def inode(ino: int) -> Inode:
    return Inode(
        ino=ino,
        mode=stat.S_IFREG,
        uid=0,
        gid=0,
        atime_ns=0,
        mtime_ns=0,
        ctime_ns=0,
        links=((1, ino),),
    )


def name(catalog: Catalog, names: dict[int, list[tuple[int, bytes]]]) -> None:
    """Put inodes with these names; each link has a number of its own."""
    with catalog.batch() as batch:
        for ino, links in names.items():
            cookies = [(parent, 100 * ino + at) for at, (parent, _) in enumerate(links)]
            batch.put(replace(inode(ino), links=tuple(cookies)))
            for (parent, cookie), (_, text) in zip(cookies, links, strict=True):
                batch.link(parent, Dentry(text, ino, cookie))


def test_an_inode_is_named_by_its_path(catalog: Catalog) -> None:
    name(catalog, {20: [(ROOT_INO, b"llama")], 21: [(20, b"a\xff\n'b"), (20, b"b")], 22: []})
    assert catalog.path_of(20) == "llama"
    assert catalog.path_of(21) == "llama/a\udcff\n'b"
    assert str(catalog.named(20)) == f"{catalog.named(20)!r}" == "'llama'"
    assert f"{catalog.named(21)}" == repr("llama/a\udcff\n'b")  # one line, which any log takes
    assert str(catalog.named(ROOT_INO)) == "the mount point"
    for gone in (22, 23):
        assert catalog.path_of(gone) == ""
        assert str(catalog.named(gone)) == f"an unlinked object (inode {gone})"


def test_a_file_is_named_by_any_name_that_is_left(catalog: Catalog) -> None:
    name(catalog, {20: [(ROOT_INO, b"d")], 21: [(20, b"a"), (20, b"b")]})
    with catalog.batch() as batch:  # as damage does it
        batch.unlink(20, Dentry(b"a", 21, 2100))
    assert catalog.path_of(21) == "d/b"


def test_a_file_that_is_not_published_is_named_by_the_name_that_it_gets(catalog: Catalog) -> None:
    name(catalog, {20: [(ROOT_INO, b"d")], 21: [], 22: []})
    with catalog.batch() as batch:
        batch.mark(keys.UNPUBLISHED, 21, keys.U64.pack(20) + b"late")
        batch.mark(keys.UNPUBLISHED, 22, bytes(8) + b"NoSpaceError")  # it is cut off
    assert catalog.to_publish(21) == (20, b"late")
    assert (catalog.path_of(21), str(catalog.named(21))) == ("", "'d/late'")
    assert catalog.to_publish(22) is None
    assert str(catalog.named(22)) == "an unlinked object (inode 22)"


def test_naming_reads_nothing_for_a_line_that_is_not_logged_and_never_fails(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name(catalog, {20: [(ROOT_INO, b"d")], 30: [(31, b"up")], 31: [(30, b"down")]})
    assert (catalog.path_of(30), str(catalog.named(30))) == ("", "inode 30")  # below itself
    caplog.set_level(logging.INFO)

    def fail(_: bytes) -> bytes:
        raise CatalogError("its disk is gone")

    monkeypatch.setattr(catalog.database, "get", fail)
    logging.getLogger("kvfs").debug("%s is a miss", catalog.named(20))
    assert (catalog.path_of(20), str(catalog.named(20))) == ("", "inode 20")
    monkeypatch.setattr(catalog.database, "get", lambda _: b"no record")
    assert (catalog.path_of(20), str(catalog.named(20))) == ("", "inode 20")


def crashed(catalog: Catalog, to: Path) -> Catalog:
    """Return the catalog that the next process finds if this one dies now."""
    for _ in range(20):
        try:
            shutil.copytree(catalog.path, to)
            break
        except shutil.Error:  # RocksDB removes tables of its own accord
            shutil.rmtree(to)
    return Catalog(to)


# Batches


def test_a_batch_is_there_when_its_block_ends(catalog: Catalog) -> None:
    with catalog.batch() as batch:
        batch.put(inode(20))
        batch.link(1, Dentry(b"a", 20, 20))
        assert catalog.inode(20) is None
    assert catalog.inode(20) == inode(20)
    assert catalog.lookup(1, b"a") == catalog.dentry(1, 20) == Dentry(b"a", 20, 20)


def test_an_exception_discards_all_of_a_batch(catalog: Catalog) -> None:
    def fail() -> None:
        with catalog.batch() as batch:
            batch.put(inode(20))
            batch.link(1, Dentry(b"a", 20, 20))
            batch.set_fact("fact", "new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert catalog.inode(20) is None
    assert catalog.lookup(1, b"a") is None
    assert catalog.dentry(1, 20) is None
    assert catalog.fact("fact") is None


def test_consequences_run_once_and_after_the_commit(catalog: Catalog) -> None:
    seen: list[tuple[str, str | None]] = []
    with catalog.batch() as batch:
        batch.set_fact("a", "1")
        batch.then(lambda: seen.append(("first", catalog.fact("a"))))
        batch.then(lambda: seen.append(("second", catalog.fact("a"))))
        assert seen == []
    assert seen == [("first", "1"), ("second", "1")]


@pytest.mark.parametrize("fault", ["", "catalog.commit=raise:EIO"])
def test_a_batch_that_fails_changes_no_record_in_memory(catalog: Catalog, fault: str) -> None:
    old, new = inode(16), inode(17)
    with catalog.batch() as batch:
        batch.put(old)
    before = old.copy()

    def change() -> None:
        with catalog.batch() as batch:
            old.size, old.links, old.sealed = 5, (), True
            batch.put(old)
            batch.put(new)
            batch.then(lambda: pytest.fail("it was not committed"))
            failpoints.arm(fault)
            if not fault:
                raise CatalogError("something else in the block")

    try:
        with pytest.raises(CatalogError):
            change()
    finally:
        failpoints.arm("")
    assert old == before == catalog.inode(16)
    assert catalog.inode(17) is None


def test_a_committed_batch_survives_the_death_of_the_process(
    catalog: Catalog, tmp_path: Path
) -> None:
    with catalog.batch() as batch:
        batch.put(inode(20))
        batch.link(1, Dentry(b"a", 20, 20))
        batch.mark_unfinished(20)
        batch.set_fact("fact", "value")
    after = crashed(catalog, tmp_path / "copy")
    assert after.inode(20) == inode(20)
    assert after.lookup(1, b"a") == Dentry(b"a", 20, 20)
    assert after.unfinished() == [20]
    assert after.fact("fact") == "value"
    after.close()


def test_marks_come_and_go(catalog: Catalog) -> None:
    with catalog.batch() as batch:
        for ino in EDGES:
            batch.mark_unfinished(ino)
    assert catalog.unfinished() == EDGES
    with catalog.batch() as batch:
        batch.mark_finished(EDGES[0])
        batch.mark_finished(99)
    assert catalog.unfinished() == EDGES[1:]


# Numbers


def test_numbers_are_never_given_out_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDS_AT_ONCE", 3)
    seen: list[int] = []
    path = tmp_path / "catalog"
    for life in range(6):
        catalog = Catalog(path)
        seen += [catalog.next_id() for _ in range(life + 1)]
        if life % 2:
            after = crashed(catalog, tmp_path / f"copy{life}")
            seen.append(after.next_id())
            after.close()
            catalog.close()
            path = after.path
        else:
            catalog.close()
    assert seen == sorted(set(seen)), "a number came again"
    assert seen[0] == module.FIRST_ID


# Scans


@pytest.mark.parametrize("parent", EDGES)
def test_names_of_any_bytes_stay_in_their_directory(catalog: Catalog, parent: int) -> None:
    with catalog.batch() as batch:
        for place in (parent - 1, parent, parent + 1):
            for cookie, name in enumerate(HOSTILE, 100):
                batch.link(place, Dentry(name, place * 1000 % (1 << 60) + cookie, cookie))
    for cookie, name in enumerate(HOSTILE, 100):
        found = catalog.lookup(parent, name)
        assert found == Dentry(name, parent * 1000 % (1 << 60) + cookie, cookie)
    assert [entry.name for entry in catalog.entries_after(parent, 0, 100)] == HOSTILE
    assert catalog.lookup(parent, b"a\xfe") is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(names=st.sets(st.binary(min_size=1, max_size=20), max_size=20), ino=st.sampled_from(EDGES))
def test_attributes_of_any_name_stay_with_their_inode(
    catalog: Catalog, names: set[bytes], ino: int
) -> None:
    with catalog.batch() as batch:
        for place in (ino - 1, ino, ino + 1):
            batch.delete(inode(place))
            for name in names:
                batch.set_xattr(place, name, name + b"!")
    assert catalog.xattr_names(ino) == sorted(names)
    assert all(catalog.xattr(ino, name) == name + b"!" for name in names)
    with catalog.batch() as batch:
        batch.delete(inode(ino))
    assert catalog.xattr_names(ino) == []
    assert catalog.xattr_names(ino + 1) == sorted(names)
    with catalog.batch() as batch:
        for place in (ino - 1, ino + 1):
            batch.delete(inode(place))


def test_a_directory_is_read_in_the_order_of_cookies(catalog: Catalog) -> None:
    cookies = [700, 3, 256, 255, 1 << 40, 65536]
    with catalog.batch() as batch:
        for cookie in cookies:
            batch.link(1, Dentry(b"%d" % cookie, cookie, cookie))
    seen: list[int] = []
    at = 2
    while entries := catalog.entries_after(1, at, 2):
        assert len(entries) <= 2
        seen += [entry.cookie for entry in entries]
        at = seen[-1]
    assert seen == sorted(cookies)
    with catalog.batch() as batch:
        batch.unlink(1, Dentry(b"256", 256, 256))
    assert [entry.cookie for entry in catalog.entries_after(1, 255, 1)] == [700]
    assert catalog.dentry(1, 256) is None
    assert catalog.lookup(1, b"256") is None


def test_inodes_are_found_in_order_and_at_once(catalog: Catalog) -> None:
    with catalog.batch() as batch:
        for ino in EDGES:
            batch.put(inode(ino))
            batch.set_left(b"@0/block", b"x")  # a lesser kind, with as many bytes as a number
            batch.link(1, Dentry(b"name", ino, ino))  # a greater kind
    assert [found.ino for found in catalog.inodes_after(0, 100)] == EDGES
    assert [found.ino for found in catalog.inodes_after(2, 2)] == EDGES[2:4]
    assert catalog.numbers_before(keys.LAST, 100) == EDGES[::-1]
    assert catalog.numbers_before(EDGES[2], 1) == [EDGES[1]]
    assert catalog.numbers_before(EDGES[0], 1) == []
    assert not catalog.unreadable
    assert catalog.inodes([255, 7, 1]) == [inode(255), None, inode(1)]
    assert catalog.inodes([]) == []


def test_attributes_go_with_their_inode_and_one_by_one(catalog: Catalog) -> None:
    with catalog.batch() as batch:
        batch.put(inode(20))
        batch.set_xattr(20, b"user.a", b"")
        batch.set_xattr(20, b"user.b", b"value")
    assert catalog.xattr(20, b"user.a") == b""
    with catalog.batch() as batch:
        batch.remove_xattr(20, b"user.a")
    assert catalog.xattr_names(20) == [b"user.b"]
    with catalog.batch() as batch:
        batch.delete(inode(20))
    assert catalog.xattr_names(20) == []
    assert catalog.inode(20) is None


# Refusals


@pytest.mark.parametrize("found", [str(FORMAT + 1), "900", "draft"])
def test_a_newer_format_is_refused_and_both_are_named(tmp_path: Path, found: str) -> None:
    catalog = Catalog(tmp_path / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("format", found)
    catalog.close()
    for _ in range(2):  # and the refused one has let go of it
        with pytest.raises(ConfigError, match=f"format {found}, .* reads up to {FORMAT}: mount"):
            Catalog(tmp_path / "catalog")


def test_a_catalog_that_is_in_use_is_refused(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match=f"catalog {catalog.path} cannot be opened"):
        Catalog(catalog.path)


@pytest.mark.parametrize("harm", ["rubbish", "file", "readonly"])
def test_a_catalog_that_cannot_be_read_is_refused(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "catalog"
    Catalog(path).close()
    if harm == "rubbish":
        (path / "CURRENT").write_text("rubbish\n")
    elif harm == "file":
        shutil.rmtree(path)
        path.write_text("a file")
    else:
        path = Path("/proc/catalog")
    with pytest.raises(ConfigError, match=f"catalog {path} cannot be opened"):
        Catalog(path)


def test_a_failing_database_is_a_catalog_error(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog")
    catalog.close()
    batch = catalog.batch()
    batch.put(inode(20))
    calls = [
        lambda: catalog.inode(20),
        lambda: catalog.inodes([20]),
        lambda: catalog.inodes_after(0, 10),
        lambda: batch.__exit__(None, None, None),
        catalog.close,
    ]
    for call in calls:
        with pytest.raises(CatalogError, match=f"catalog {catalog.path}"):
            call()


def test_records_are_as_they_were_at_the_first(catalog: Catalog) -> None:
    with catalog.batch() as batch:
        for ino in (20, 21, 22):
            batch.put(inode(ino))
    records = catalog.records(b"i")
    assert audit.inode(*next(records)) == inode(20)
    with catalog.batch() as batch:
        batch.delete(inode(21))
        batch.put(inode(23))
    assert [keys.number(key) for key, _ in records] == [21, 22]
    assert [keys.number(key) for key, _ in catalog.records(b"i")] == [20, 22, 23]
    assert catalog.record(b"i", keys.number_key(21)) is None


def test_records_end_when_the_catalog_is_opened_anew(catalog: Catalog) -> None:
    with catalog.batch() as batch:
        batch.put(inode(20))
        batch.put(inode(21))
    records = catalog.records(b"i")
    next(records)
    catalog.database.openings += 1
    with pytest.raises(CatalogError, match="opened anew while it was read"):
        next(records)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("by_cookie", b"short", b"12345678x"),
        ("by_cookie", b"\0" * 16, b"12345678"),
        ("by_name", b"12345678", b"\0" * 16),
        ("by_name", b"12345678x", b"short"),
        ("inode", b"short", inode(20).pack()),
        ("inode", b"\0" * 8, b""),
        ("inode", b"\0" * 8, replace(inode(20), mode=0).pack()),
        ("inode", b"\0" * 8, replace(inode(20), digest=b"short").pack()),
        ("inode", b"\0" * 8, inode(20).pack()[:-16]),
    ],
)
def test_malformed_record_is_decoded_as_none(kind: str, key: bytes, value: bytes) -> None:
    assert getattr(audit, kind)(key, value) is None


# Damage


def damaged(path: Path, count: int) -> Catalog:
    """So many inodes and names, and a few blocks in the middle of the table spoilt."""
    catalog = Catalog(path)
    for first in range(0, count, 1000):
        with catalog.batch() as batch:
            for ino in range(first + 100, first + 1100):
                batch.put(inode(ino))
                batch.link(1, Dentry(b"%032d" % ino, ino, ino))
    catalog.database._db.flush()
    catalog.close()
    (table,) = path.glob("*.sst")
    with table.open("r+b") as file:
        for part in range(1, 20):
            file.seek(table.stat().st_size * part // 20)
            file.write(b"spoilt")
    return Catalog(path)


def test_a_block_that_cannot_be_read_is_no_end(tmp_path: Path) -> None:
    """The scan raises, whether it begins before the block or in it; what is whole is read."""
    catalog = damaged(tmp_path / "catalog", 20_000)
    try:
        scans: list[Callable[[], object]] = [
            lambda: catalog.inodes_after(0, 1 << 20),
            lambda: catalog.numbers_before(keys.LAST, 1 << 20),
            lambda: catalog.entries_after(1, 0, 1 << 20),
            lambda: list(catalog.records(b"d")),
        ]
        for scan in scans:
            with pytest.raises(CatalogError, match=r"scan failed: .*Corruption"):
                scan()
        assert [found.ino for found in catalog.inodes_after(0, 10)] == list(range(100, 110))
        unreadable = 0
        for ino in range(100, 20_100):
            try:
                assert catalog.inode(ino) == inode(ino)
            except CatalogError:
                unreadable += 1
        assert 0 < unreadable < 10_000
    finally:
        catalog.close()


def test_a_record_that_makes_no_sense_is_said_once_and_passed_by(
    catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    with catalog.batch() as batch:
        for ino in range(20, 25):
            batch.put(inode(ino))
    catalog.commit([(b"i" + keys.number_key(22), b"nonsense"), (b"ishort", b"x")], sync=False)
    for _ in range(2):
        assert [found.ino for found in catalog.inodes_after(0, 100)] == [20, 21, 23, 24]
        assert [found.ino for found in catalog.inodes_after(20, 2)] == [21, 23]
        assert catalog.inodes([21, 22, 23]) == [inode(21), None, inode(23)]
        with pytest.raises(CatalogError, match="record of inode 22 is invalid"):
            catalog.inode(22)
    assert catalog.unreadable == {22}
    assert caplog.text.count("kvfs fsck --repair removes it") == 1


def test_marks_with_malformed_keys_are_skipped(catalog: Catalog) -> None:
    with catalog.batch() as batch:
        batch.mark(b"n", 7, b"x")
    catalog.commit([(b"nshort", b"y"), (b"oshort", b"")], sync=False)
    assert catalog.marks(b"n") == [(7, b"x")]
    assert catalog.unfinished() == []


@pytest.mark.parametrize(
    "value", [b"", b"short", b"12345678", b"12345678a/b", b"12345678a\0", b"12345678" + b"x" * 256]
)
def test_publication_with_an_invalid_name_is_none(value: bytes) -> None:
    assert audit.publication(value) is None
    assert audit.publication(b"\0" * 7 + b"\x05name") == (5, b"name")


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"short", b"e\0m"), (b"\0" * 8, b"e\0m"), (b"\xff" * 8, b"e\0m"), (b"\0" * 7 + b"\1", b"e")],
)
def test_malformed_model_is_none(key: bytes, value: bytes) -> None:
    assert audit.model(key, value) is None
    assert audit.model(b"\0" * 7 + b"\1", b"engine\0model") == 1


# A bucket


@given(
    st.builds(
        Stored,
        key=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1),
        etag=st.text(st.characters(min_codepoint=33, max_codepoint=126)),
        size=st.integers(0, (1 << 63) - 1),
        digest=st.binary(min_size=16, max_size=16),
        codec=st.sampled_from(["none", "blosc-zstd-s2/1"]),
        attributes=st.sampled_from(["", "0644 0 1000 -1700000000"]),
    )
)
def test_stored_record_is_decoded_unchanged(stored: Stored) -> None:
    assert audit.stored(keys.stored_value(stored)) == stored


@pytest.mark.parametrize("first", ["flag", "mark"])
def test_a_catalog_of_format_2_is_one_of_format_3_from_the_first_object_in_a_bucket(
    tmp_path: Path, first: str
) -> None:
    catalog = Catalog(tmp_path / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("format", "2")
    catalog.close()
    catalog = Catalog(tmp_path / "catalog")
    placed = inode(20)
    placed.key = 5
    with catalog.batch() as batch:
        batch.put(placed)
        batch.mark(keys.MODELS, 1, b"engine\0model")
    assert catalog.fact("format") == "2", "the kvfs that wrote it can have it back"
    with catalog.batch() as batch:
        if first == "flag":
            placed.in_bucket = True
            batch.put(placed)
        else:
            batch.mark(keys.UNSTORED, 20, bytes(8))
    assert (catalog.fact("format"), catalog.format) == ("3", 3)
    catalog.close()


def test_a_catalog_of_format_4_is_one_of_format_5_from_the_first_digest_of_a_sparse_file(
    tmp_path: Path,
) -> None:
    catalog = Catalog(tmp_path / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("format", "4")
    catalog.close()
    catalog = Catalog(tmp_path / "catalog")
    one = inode(20)
    one.size, one.digest = 1 << 40, bytes(range(16))
    with catalog.batch() as batch:
        batch.put(one)
    assert catalog.fact("format") == "4", "the kvfs that wrote it can have it back"
    one.digest = SPARSE + one.digest
    with catalog.batch() as batch:
        batch.put(one)
    assert (catalog.fact("format"), catalog.format) == ("5", 5)
    catalog.close()
    catalog = Catalog(tmp_path / "catalog")
    assert catalog.inode(20) == one
    catalog.close()


def test_a_catalog_of_format_3_is_one_of_format_4_from_the_first_packed_copy(
    tmp_path: Path,
) -> None:
    catalog = Catalog(tmp_path / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("format", "3")
    catalog.close()
    catalog = Catalog(tmp_path / "catalog")
    one = inode(20)
    one.in_bucket = True
    with catalog.batch() as batch:
        batch.put(one)
    assert catalog.fact("format") == "3", "the kvfs that wrote it can have it back"
    one.packed = PackedCopy("blosc-zstd-s2/1", 10, 8, bytes(16))
    with catalog.batch() as batch:
        batch.put(one)
    assert (catalog.fact("format"), catalog.format) == ("4", 4)
    catalog.close()
    catalog = Catalog(tmp_path / "catalog")
    assert catalog.inode(20) == one
    catalog.close()


def test_a_directory_is_read_as_it_was_committed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog keeps records of directories: changes, refused ones too, and deletes count."""
    catalog = Catalog(tmp_path)
    directory = Inode(20, stat.S_IFDIR | 0o755, 0, 0, links=((1, 20),))
    with catalog.batch() as batch:
        batch.put(directory)
    found = catalog.inode(20)
    assert found == directory
    assert found is not None
    found.subdirs = 7  # of this caller alone
    assert catalog.inode(20) == directory
    with catalog.batch() as batch:
        batch.put(found)
        found.subdirs = 8  # not put
    now = catalog.inode(20)
    assert now is not None
    assert now.subdirs == 7

    def refuse(*_: object, **__: object) -> None:
        raise CatalogError("no room")

    now.subdirs = 9
    with monkeypatch.context() as patched:
        patched.setattr(catalog, "commit", refuse)
        with pytest.raises(CatalogError), catalog.batch() as batch:
            batch.put(now)
    assert now.subdirs == 7
    assert catalog.inode(20) == now
    with catalog.batch() as batch:
        batch.put(replace(now, mode=stat.S_IFREG))
    changed = catalog.inode(20)
    assert changed is not None
    assert not changed.is_dir
    with catalog.batch() as batch:
        batch.put(now)
        batch.delete(now)
    assert catalog.inode(20) is None
    catalog.close()
