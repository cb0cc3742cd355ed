"""Which lookups of absent names count as misses, and when."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from kvfs.core.ledger.misses import LATE, MANY
from kvfs.errors import CatalogError
from tests.unit.world import World, world

ROOT = 1
PAGE = f"{7:064x}_model_0_1.bin".encode()


def counts(made: World) -> int:
    found = made.ledger.counters["misses"]
    assert found == sum(space.counters["misses"] for space in made.ledger.namespaces)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time in ns."""
    now = [10**12]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    return now


def test_a_lookup_counts_when_no_create_can_follow(tmp_path: Path, clock: list[int]) -> None:
    with world(tmp_path) as made:
        made.ledger.misses.looked_up(ROOT, b"a")
        made.ledger.misses.settle()
        assert counts(made) == 0
        clock[0] += LATE + 1
        made.ledger.misses.settle()
        made.ledger.misses.settle()
        assert counts(made) == 1


def test_all_but_the_last_lookup_of_a_name_count_at_once(tmp_path: Path, clock: list[int]) -> None:
    with world(tmp_path) as made:
        for _ in range(3):
            made.ledger.misses.looked_up(ROOT, b"a")
        made.ledger.misses.settle()
        assert counts(made) == 2
        made.ledger.misses.named(ROOT, b"a")
        clock[0] += LATE + 1
        made.ledger.misses.settle()
        assert counts(made) == 2


def test_only_the_lookup_of_the_kernel_is_taken_back(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        for _ in range(3):
            made.ledger.misses.looked_up(ROOT, b"a")
        made.ledger.misses.looked_up(ROOT, b"b")
        made.ledger.misses.named(ROOT, b"a")
        assert counts(made) == 2
        made.ledger.misses.named(ROOT, b"b")
        made.ledger.misses.named(ROOT, b"c")
        assert counts(made) == 2


def test_after_a_refusal_the_kernel_looks_twice_for_one_open(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.ledger.misses.refused(7)
        for thread in (7, 8, 7, 7):  # the second one of 7 is the kernel's own
            made.ledger.misses.looked_up(ROOT, b"a", thread)
        made.ledger.misses.settle(late=0)
        assert counts(made) == 3


@pytest.mark.parametrize("knows_it", [True, False])
def test_after_a_refusal_the_lookup_for_a_create_is_taken_back(
    tmp_path: Path, *, knows_it: bool
) -> None:
    """knows_it: the kernel still has the name that was refused, so it looks twice."""
    with world(tmp_path) as made:
        made.ledger.misses.refused(7)
        for _ in range(2 + knows_it):
            made.ledger.misses.looked_up(ROOT, b"a", 7)
        made.ledger.misses.named(ROOT, b"a")
        assert counts(made) == 1


def test_after_a_refusal_other_names_count(tmp_path: Path) -> None:
    """The kernel has forgotten the name that was refused, so it looked it up once."""
    with world(tmp_path) as made:
        made.ledger.misses.refused(7)
        for name in (b"a", b"b", b"b"):
            made.ledger.misses.looked_up(ROOT, name, 7)
        made.ledger.misses.settle(late=0)
        assert counts(made) == 3


def test_a_refusal_is_forgotten(tmp_path: Path, clock: list[int]) -> None:
    with world(tmp_path) as made:
        made.ledger.misses.refused(7)
        made.ledger.misses.refused(8)
        clock[0] += LATE + 1
        for _ in range(2):
            made.ledger.misses.looked_up(ROOT, b"a", 7)
        made.ledger.misses.settle(late=0)
        assert counts(made) == 2
        assert not made.ledger.misses._refused


def test_a_mkdir_takes_all_lookups_back(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        for _ in range(3):
            made.ledger.misses.looked_up(ROOT, b"a")
        made.ledger.misses.named(ROOT, b"a", as_directory=True)
        assert counts(made) == 0


def test_a_complete_object_makes_lookups_of_its_key_misses(tmp_path: Path) -> None:
    """The ghosts see the miss before the store, whatever temporary name the object had."""
    with world(tmp_path) as made:
        made.ledger.misses.looked_up(ROOT, PAGE)
        trio.run(made.make_file, PAGE, b"content")
        assert counts(made) == 1
        space = made.ledger.namespaces.default
        space.accesses.count()
        assert space.would_be.hit_ratios()[1.0] == 0.0
        assert space.would_be.accesses == 1


def test_names_that_are_no_blocks_do_not_count(tmp_path: Path, clock: list[int]) -> None:
    with world(tmp_path) as made:
        for name in (b".git", b".0dd14a27-8d2a-4f62-9d9c-6ad8f1f3ac4f.tmp"):
            made.ledger.misses.looked_up(ROOT, name)
        made.ledger.misses.looked_up(12345, b"in no directory")
        clock[0] += LATE + 1
        made.ledger.misses.settle()
        assert counts(made) == 0


def test_an_unreadable_directory_fails_no_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path) as made:
        made.ledger.misses.looked_up(ROOT, b"a")

        def unreadable(_: int) -> None:
            raise CatalogError("the record makes no sense")

        with monkeypatch.context() as context:
            context.setattr(made.ledger.misses, "catalog", SimpleNamespace(inode=unreadable))
            trio.run(made.make_file, PAGE, b"content")
            made.ledger.misses.settle(late=0)
        assert counts(made) == 0


def test_lookups_that_wait_are_bounded(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        for number in range(MANY + 10):
            made.ledger.misses.looked_up(ROOT, b"%d" % number)
        assert counts(made) == 10


def test_an_object_that_was_renamed_is_known_by_its_new_name(tmp_path: Path) -> None:
    """The what-if of other sizes does not count the first open as a miss."""
    with world(tmp_path) as made:
        trio.run(made.make_file, b"part", b"content")
        made.renames.rename(ROOT, b"part", ROOT, b"final", 0)
        space = made.ledger.namespaces.default
        for name, hit in ((b"final", 1.0), (b"part", 0.0)):
            key = made.ledger.namespaces.places.keys(made.at(b""), name)[0]
            assert all((key in ghost.policy) == hit for ghost in space.would_be.ghosts.values())
