"""The census of a catalog that has an unreadable place; for all else see test_removals."""

import random
from pathlib import Path

import pytest
import trio

from kvfs.catalog import Inode, keys
from kvfs.core import dispatcher as flow_module
from kvfs.errors import CatalogError
from tests.unit.test_check import kinds, look
from tests.unit.world import World, world

BYTES = random.Random(3).randbytes(9000)


def test_a_record_that_makes_no_sense_does_not_end_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon logs and counts the record, and counts the other objects.

    The record's file stays for a repair: fsck finds it and removes it.
    """

    async def before(made: World) -> list[Inode]:
        found = [await made.store(b"%d" % number, BYTES, made.disk) for number in range(5)]
        key = keys.INODES + keys.number_key(found[2].ino)
        made.catalog.commit([(key, b"nonsense")], sync=False)
        return found

    async def after(made: World, stored: list[Inode]) -> None:
        await made.census()
        assert made.ledger.accounts.census_done.is_set()
        assert made.ledger.counters["inodes_unreadable"] == 1
        assert caplog.text.count("is invalid") == 1
        assert made.disk.objects == 4
        left = {path for _, _, path in made.disk.files()}
        assert left == {made.disk.path(inode.ino, inode.version) for inode in stored}
        listed = [name for name, _, _ in made.tree.list_entries(1, 2, 100).entries]
        assert listed == [b"0", b"1", b"3", b"4"]
        with pytest.raises(CatalogError, match="is invalid"):
            made.find(b"2")
        assert kinds((await look(made, repair=True))[0]) == ["leftover", "name", "record"]
        assert (await look(made, hashes=True))[0] == []
        made.check()

    with world(tmp_path) as made:
        stored = trio.run(before, made)
        made.restart()
        trio.run(after, made, stored)


def spoil(catalog: Path) -> None:
    """A piece out of the middle of each table."""
    for table in catalog.glob("*.sst"):
        with table.open("r+b") as file:
            file.seek(table.stat().st_size // 2)
            file.write(b"spoilt")


def test_a_block_that_cannot_be_read_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first error may pass, so that it is tried again; then what can be read is counted."""
    monkeypatch.setattr(flow_module, "PAUSE", 0.01)
    count = 3000

    async def before(made: World) -> None:
        for _ in range(3):
            with made.catalog.batch() as batch:
                for _ in range(count // 3):
                    ino = made.catalog.next_id()
                    batch.put(
                        Inode(ino, 0o100644, 0, 0, sealed=True, on_nvme=True, links=((1, 9),))
                    )
        made.catalog.database._db.flush()

    async def after(made: World) -> None:
        with trio.fail_after(60):
            await flow_module.Dispatcher.keep_up(made.census)
        assert made.ledger.accounts.census_done.is_set()
        assert caplog.text.count("background work goes on") == 1
        assert "are not counted: " in caplog.text
        assert count // 2 < made.disk.objects < count
        with pytest.raises(CatalogError, match="scan failed"):
            await look(made, live=False)

    with world(tmp_path) as made:
        trio.run(before, made)
        made.stop()
        spoil(tmp_path / "catalog")
        made.start()
        trio.run(after, made)
