"""A daemon that dies, or whose call fails, at any place loses nothing that it must keep.

A failure names the scenario, the fail point and the passing; to repeat it, arm that point.
"""

import errno
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from kvfs import failpoints, mounts
from kvfs.core.moves import transfers
from kvfs.errors import KvfsError
from tests.faults.lives import COUNT, live, passed
from tests.faults.scenarios import (
    SCENARIOS,
    Scenario,
    check_end,
    check_state,
    found,
    reset,
    world_of,
)
from tests.unit.world import World, few_folders

pytestmark = pytest.mark.slow

DEATHS = 100  # of one scenario at one point; it passes any less often
LASTING = 40  # commits that fail one after the other


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Path]:
    """Storage in memory: no power is cut here, and RocksDB opens in a third of the time."""
    mounts.mount("test", tmp_path, "tmpfs", 0, "size=512M,mode=0700")
    try:
        yield tmp_path
    finally:
        mounts.umount(tmp_path, mounts.MNT_DETACH)  # and with it the RAM tiers below


@contextmanager
def inhabited(storage: Path, scenario: Scenario) -> Iterator[World]:
    with few_folders():
        made = world_of(storage, scenario)
        try:
            yield made
        finally:
            made.end()


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.fixture(autouse=True)
def here_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the limits that `world_of` makes small, for tests of other modules."""
    monkeypatch.setattr(transfers, "PACKED_LEAST", transfers.PACKED_LEAST)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_death_at_any_point_loses_nothing(storage: Path, name: str) -> None:
    """Each life checks the storage that the life before has left."""
    assert live(storage, name)
    for point in passed(storage):
        for passing in range(1, DEATHS):
            if live(storage, name, f"{point}=kill@{passing}"):
                break
        else:
            pytest.fail(f"{name} passes {point} more than {DEATHS} times")
        assert passing > 1, f"{name} passed {point} when nothing was armed, but now does not"
    assert live(storage, name)


@pytest.mark.parametrize(
    "fault",
    [
        "catalog.commit=kill@1",
        "catalog.committed=kill@1",
        "tiers.rename=kill@1",
        "tiers.renamed=kill@1",
        "catalog.commit=kill@2",
    ],
)
@pytest.mark.parametrize("name", ["in place in RAM", "in place on NVMe", "in place in both"])
def test_sealed_object_survives_an_open_for_writing_that_died(
    storage: Path, name: str, fault: str
) -> None:
    """A sealed object is not lost to a writer that never got its handle."""
    assert not live(storage, name, fault)
    assert live(storage, name, outcomes=1)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("in place in RAM", "tiers.renamed=kill@1"),
        ("in place on NVMe", "tiers.renamed=kill@1"),
        ("in place in both", "catalog.committed=kill@2"),
        ("create in RAM", "catalog.committed=kill@1"),
        ("unlink open", "catalog.committed=kill@1"),
        ("rewrite in both", "catalog.committed=kill@1"),
    ],
)
def test_a_death_while_the_death_before_is_mended(storage: Path, name: str, fault: str) -> None:
    """The third life dies as the first did; it has checked the storage after both."""
    assert not live(storage, name, fault)
    assert live(storage, name)
    points = passed(storage, "starting")
    assert points
    for point, times in points.items():
        for passing in range(1, times + 1):
            assert not live(storage, name, fault)
            assert not live(storage, name, at_start=f"{point}=kill@{passing}")
    assert live(storage, name)


def faults_of(counted: Counter[str]) -> Iterator[str]:
    """Each point that may raise, at each passing; for commits also from one passing on."""
    for point, times in counted.items():
        if not failpoints.POINTS[point]:
            continue
        for passing in range(1, times + 1):
            for number in (errno.ENOSPC, errno.EIO):
                yield f"{point}=raise:{errno.errorcode[number]}@{passing}"
            if point == "catalog.commit":
                later = range(passing, passing + LASTING)
                yield ";".join(f"{point}=raise:EIO@{number}" for number in later)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_refusal_at_any_point_changes_nothing_by_half(storage: Path, name: str) -> None:
    scenario = SCENARIOS[name]

    async def attempt(made: World, faults: str) -> tuple[Counter[str], bool]:
        """The points that were passed, and whether the scenario succeeded."""
        await reset(made)
        await scenario.prepare(made)
        failpoints.arm(faults)
        try:
            await scenario.act(made)
        except KvfsError as error:
            print(f"    {type(error).__name__}: {error}")
            succeeded = False
        else:
            succeeded = True
        counted = failpoints.passed.copy()
        failpoints.arm("")
        await made.ledger.retries.run()
        return counted, succeeded

    async def refuse(made: World, faults: str) -> None:
        print(name, faults[:60])
        _, succeeded = await attempt(made, faults)
        # A file that can neither be unlinked nor put aside stays until the next census.
        made.swept = not faults.startswith(("tiers.unlink=", "tiers.quarantine="))
        made.check()
        if not succeeded and await found(made) == scenario.outcomes[0]:
            await scenario.act(made)
            await check_state(made, scenario, scenario.outcomes[-1:])
            check_end(made, scenario)
        else:
            await check_state(made, scenario, scenario.outcomes)

    with inhabited(storage, scenario) as made:
        counted, succeeded = trio.run(attempt, made, COUNT)
        assert succeeded
        for faults in faults_of(counted):
            trio.run(refuse, made, faults)
            if not made.swept:
                made.restart(crash=True)
                trio.run(made.census)
                trio.run(check_state, made, scenario, scenario.outcomes)


def test_every_point_is_passed(storage: Path) -> None:
    points: set[str] = set()

    async def run(made: World, name: str) -> None:
        await reset(made)
        await SCENARIOS[name].prepare(made)
        failpoints.arm(COUNT)
        await SCENARIOS[name].act(made)
        points.update(failpoints.passed)
        failpoints.arm("")

    for bucket in (False, True):
        names = [name for name, scenario in SCENARIOS.items() if scenario.bucket == bucket]
        with inhabited(storage, SCENARIOS[names[0]]) as made:
            for name in names:
                trio.run(run, made, name)
    # What is the kernel's face only has its own: tests/faults/test_takeover.py.
    assert points == {point for point in failpoints.POINTS if not point.startswith("fuse.")}
