"""Which objects of the index a node hides after it has taken their names."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.catalog import Catalog
from kvfs.core.pool.leaving import Leaving
from kvfs.pool.records import GoneEntry, PoolEntry, Unlinked
from kvfs.s3.facts import Facts

KEY, DIGEST, MTIME = "@0/block", b"d" * 16, 1000
FAR = 1 << 62  # ns since 1970: later than any question of this test
FACTS = Facts(
    size=1, digest=DIGEST, mtime_ns=MTIME, mode=0o644, uid=0, gid=0, stored_size=1,
    stored_digest=DIGEST,
)  # fmt: skip


@pytest.fixture
def leaving(tmp_path: Path) -> Iterator[Leaving]:
    catalog = Catalog(tmp_path / "c")
    found = Leaving(catalog)
    yield found
    catalog.close()


def unlink(leaving: Leaving) -> None:
    left = Unlinked(KEY, DIGEST, MTIME)
    with leaving.catalog.batch() as batch:
        leaving.leaves(left, batch)
    leaving.told(left, 5, gone=True)


def answer(asked_ns: int) -> PoolEntry:
    """The object has its name again, as after a rename there and back."""
    return PoolEntry(FACTS, (), GoneEntry(DIGEST, MTIME), asked_ns)


def test_object_that_has_its_name_again_is_seen(leaving: Leaving) -> None:
    leaving.retold()
    unlink(leaving)
    assert leaving.hides(KEY, FACTS)
    assert not leaving.hides(KEY, FACTS, answer(FAR))


def test_answer_from_before_an_unlink_brings_nothing_back(leaving: Leaving) -> None:
    leaving.retold()
    unlink(leaving)
    assert leaving.hides(KEY, FACTS, answer(1))


def test_index_that_may_not_know_an_unlink_brings_nothing_back(leaving: Leaving) -> None:
    """The daemon before this one may have died before it told the index."""
    unlink(leaving)
    known = Leaving(leaving.catalog)
    assert known.hides(KEY, FACTS, answer(FAR))
