"""A daemon that dies, or is refused something, at any place loses nothing it has to keep.

A failure names the scenario, the fail point and the passing; to repeat it, arm that.
"""

import errno
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs import failpoints, mounts, runtime
from kvfs.errors import KvfsError
from tests.faults.lives import COUNT, live, passed
from tests.faults.scenarios import SCENARIOS, check_end, check_state, reset
from tests.unit.world import World, world

pytestmark = pytest.mark.slow

DEATHS = 100  # of one scenario at one point; it passes any less often
LASTING = 40  # commits that fail one after the other


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    ram = tmp_path / "ram"
    if runtime.mount_at(ram) is not None:
        mounts.umount(ram, mounts.MNT_DETACH)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_death_at_any_point_loses_nothing(storage: Path, name: str) -> None:
    """Each life looks at what the one before it has left."""
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
def test_what_was_not_yet_written_is_kept(
    storage: Path, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sealed object is not lost to a writer that never got its handle."""
    assert not live(storage, name, fault)
    scenario = SCENARIOS[name]
    made = World(storage)
    try:
        trio.run(check_state, made, scenario, scenario.outcomes[:1])
    finally:
        made.end()
    del monkeypatch


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
    kills = 0
    for point in failpoints.POINTS:
        for passing in range(1, DEATHS):
            assert not live(storage, name, fault)
            if live(storage, name, at_start=f"{point}=kill@{passing}"):
                break
            kills += 1
    assert kills, "the start passes no point"


def faults_of(counted: Counter[str]) -> Iterator[str]:
    """Each point that may raise, at each passing; commits also from one passing on."""
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
def test_a_refusal_at_any_point_changes_nothing_by_half(tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]

    async def attempt(made: World, faults: str) -> tuple[Counter[str], bool]:
        """What was passed, and whether it succeeded."""
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
        await made.residency.retry()
        return counted, succeeded

    async def refuse(made: World, faults: str) -> None:
        print(name, faults[:60])
        _, succeeded = await attempt(made, faults)
        made.swept = "tiers.unlink=" not in faults  # a file that cannot be unlinked stays
        state = await check_state(made, scenario, scenario.outcomes)
        if not succeeded and state == scenario.outcomes[0]:
            await scenario.act(made)
            await check_state(made, scenario, scenario.outcomes[-1:])
            check_end(made, scenario)

    with world(tmp_path) as made:
        counted, succeeded = trio.run(attempt, made, COUNT)
        assert succeeded
        for faults in faults_of(counted):
            trio.run(refuse, made, faults)
            if not made.swept:
                made.restart(crash=True)
                trio.run(made.census)
                trio.run(check_state, made, scenario, scenario.outcomes)


def test_every_point_is_passed(tmp_path: Path) -> None:
    found: set[str] = set()

    async def run(made: World, name: str) -> None:
        await reset(made)
        await SCENARIOS[name].prepare(made)
        failpoints.arm(COUNT)
        await SCENARIOS[name].act(made)
        found.update(failpoints.passed)
        failpoints.arm("")

    with world(tmp_path) as made:
        for name in SCENARIOS:
            trio.run(run, made, name)
    # What is the kernel's face only has its own: tests/faults/test_takeover.py.
    assert found == {point for point in failpoints.POINTS if not point.startswith("fuse.")}
