"""A check of a deep tree asks the catalog as often for each inode as one of a flat tree."""

from collections import Counter
from pathlib import Path

import pytest
import trio

from kvfs.catalog import ROOT_INO, Catalog
from kvfs.core.check.survey import SHOWN
from tests.unit.test_check import DIR, look
from tests.unit.world import World, world

FEW, MANY = 150, 600


async def chain(made: World, levels: int) -> list[int]:
    """Directories, each in the one before it."""
    inos = [ROOT_INO]
    for _ in range(levels):
        inos.append(made.tree.make(inos[-1], b"d", DIR, 0, 0).ino)
    return inos[1:]


async def asked(
    made: World, monkeypatch: pytest.MonkeyPatch, *, live: bool, repair: bool
) -> tuple[int, int]:
    """How often a check asks the catalog for single records, and how much it finds."""
    count = Counter[str]()
    with monkeypatch.context() as patched:
        for name in ("inode", "record", "dentry", "lookup"):
            real = getattr(Catalog, name)

            def counting(self: Catalog, *given: object, real: object = real) -> object:
                count["asked"] += 1
                return real(self, *given)  # type: ignore[operator]

            patched.setattr(Catalog, name, counting)
        found, _ = await look(made, live=live, repair=repair)
    return count["asked"], len(found)


@pytest.mark.parametrize(("live", "wrong"), [(False, False), (True, False), (False, True)])
def test_reads_of_a_check_grow_with_inodes_and_not_with_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, live: bool, wrong: bool
) -> None:
    """Wrong: each directory is accounted to a namespace that is not there."""

    def once(levels: int) -> float:
        async def case() -> float:
            for ino in await chain(made, levels):
                inode = made.catalog.inode(ino)
                assert inode is not None
                if wrong:
                    inode.namespace = 1 << 40  # there is none
                    with made.catalog.batch() as batch:
                        batch.put(inode)
            times, findings = await asked(made, monkeypatch, live=live, repair=False)
            assert (findings > levels / 2) == wrong, findings
            return times / levels

        (tmp_path / f"{levels}").mkdir()
        with world(tmp_path / f"{levels}") as made:
            return trio.run(case)

    few, many = once(FEW), once(MANY)
    print("asked for each directory:", few, many)
    assert many < 1.25 * few + (2 * SHOWN if wrong else 0)
