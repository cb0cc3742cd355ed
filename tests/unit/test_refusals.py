"""Lines of the log about refused writers: one for each cause, and what they name."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from kvfs.core.capacity import refusals
from kvfs.core.capacity.refusals import HOLDERS, LOOK, QUIET
from kvfs.errors import NoSpaceError, QuotaError
from tests.unit.world import MIB, World, world

BYTES = os.urandom(MIB)
PER_CAUSE = "(said once in 10 minutes per cause)"


class Clock:
    """The clock of refusals: each refusal comes late enough for a look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += LOOK
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(refusals, "time", made)
    return made


def run(case: Callable[[World], Awaitable[None]], tmp_path: Path, **options: int) -> None:
    with world(tmp_path, **options) as made:
        trio.run(case, made)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The new lines about refused writers."""
    found = [told for one in caplog.records if "writers get" in (told := one.getMessage())]
    caplog.clear()
    return found


async def fill(made: World, path: bytes) -> list[bytes]:
    """Write files until one is refused; return the names of the others."""
    for number in range(100):
        try:
            await made.make_file(b"%b/%d" % (path, number), BYTES)
        except (NoSpaceError, QuotaError):
            return [b"%b/%d" % (path, one) for one in range(number)]
    raise AssertionError("there is room for 100 files")


async def refuse(made: World, path: bytes = b"a/more") -> None:
    with pytest.raises((NoSpaceError, QuotaError)):
        await made.make_file(path, BYTES)


def test_a_changed_cause_of_enospc_gets_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    async def case(made: World) -> None:
        made.namespace("a", eviction="never")
        files = await fill(made, b"a")
        (line,) = lines(caplog)
        assert "(eviction=never); set another eviction, unlink files or give a larger" in line
        assert line.endswith(PER_CAUSE)
        await refuse(made)
        assert lines(caplog) == [], "the cause is told"
        made.tell("a", pin="on")
        await refuse(made)
        (line,) = lines(caplog)
        assert "(pin=on); set pin=off, unlink files or give" in line
        made.tell("a", pin="off", eviction="lru")
        held = [await made.objects.open(made.at(path).ino, writable=False) for path in files]
        await refuse(made)
        (line,) = lines(caplog)
        assert "(open files)" in line
        made.ledger.dirty.bytes += MIB
        await refuse(made)
        (line,) = lines(caplog)
        assert "1.0 MiB wait for the bucket" in line
        assert "wait for the uploads or give" in line
        made.ledger.dirty.bytes -= MIB
        await refuse(made)
        assert lines(caplog) == [], "nothing new holds room"
        clock.now += QUIET
        await refuse(made)
        assert len(lines(caplog)) == 1
        for one in held:
            await made.close(one, writable=False)

    run(case, tmp_path, ram=8 * MIB, nvme=0)


def test_cures_are_those_of_the_named_holders_the_largest_first(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("pins", pin="on")
        await made.make_file(b"pins/0", BYTES[: MIB // 4])
        for number in range(HOLDERS):
            made.namespace(f"b{number}", eviction="never")
            await made.make_file(b"b%d/0" % number, BYTES[: MIB // 2])
        space = made.namespace("a")

        def told() -> str:
            return refusals.held_room(made.room, space, [made.fast]).text

        assert "256.0 KiB more; set another eviction, unlink files or give" in told()
        assert "pin" not in told(), "no named holder is pinned"
        made.tell("b0", eviction="lru")
        assert "; set another eviction, unlink files, set pin=off or give" in told()

    run(case, tmp_path, ram=8 * MIB, nvme=0)


def test_cut_off_files_of_one_cause_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    def told() -> list[str]:
        found = [one.message for one in caplog.records if "is cut off:" in one.message]
        caplog.clear()
        return found

    async def case(made: World) -> None:
        async def cut(path: bytes) -> None:
            held = await made.create(path.rpartition(b"/")[2], BYTES, made.at(b"a").ino)
            os.pwrite(held.fd, 4 * BYTES, 0)
            made.objects.sealing.bounds.look()
            assert held.doom is not None
            with pytest.raises(QuotaError):
                await made.close(held, writable=True)

        made.namespace("a", quota_hard="3M")
        await cut(b"a/0")
        (line,) = told()
        assert line.startswith("'a/0' is cut off: it takes 4.0 MiB")
        assert line.endswith(f"; its writer's close fails {PER_CAUSE}")
        await cut(b"a/1")
        assert told() == []
        clock.now += QUIET
        await cut(b"a/2")
        assert len(told()) == 1

    run(case, tmp_path)


def test_a_cut_off_file_is_told_with_what_holds_its_quota(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case(made: World) -> None:
        made.namespace("a", eviction="never", quota_hard="3M")
        await made.make_file(b"a/0", bytes(2 * MIB))
        held = await made.create(b"1", b"", made.at(b"a").ino)
        os.pwrite(held.fd, b"x" * 2 * MIB, 0)
        made.objects.sealing.bounds.look()
        (line,) = (one.message for one in caplog.records if "is cut off:" in one.message)
        assert "nothing more may be dropped; eviction=never; set another eviction, unlink" in line
        with pytest.raises(QuotaError):
            await made.close(held, writable=True)

    run(case, tmp_path)


def test_a_changed_cause_of_edquot_gets_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    async def case(made: World) -> None:
        made.namespace("a", eviction="never", quota_hard="3M")
        await fill(made, b"a")
        (line,) = lines(caplog)
        assert "; eviction=never; set another eviction, unlink files or raise its quota" in line
        assert line.endswith(PER_CAUSE)
        await refuse(made)
        assert lines(caplog) == []
        made.tree.unlink(made.at(b"a").ino, b"0")
        block = b"model@1@0@1@half.data"
        made.learn(made.at(b"a"), block, 2 * MIB)
        await refuse(made, b"a/" + block)
        (line,) = lines(caplog)
        assert "a new file is expected to take 2.0 MiB" in line
        made.namespace("b", eviction="never", quota_objects="1")
        await fill(made, b"b")
        (line,) = lines(caplog)
        assert line.startswith("namespace b: writers get EDQUOT"), "each namespace has its causes"

    del clock
    run(case, tmp_path)


@pytest.mark.parametrize(
    ("settings", "told", "cure"),
    [
        ({"eviction": "never"}, "eviction=never", "set another eviction"),
        ({"pin": "on"}, "pin=on", "set pin=off"),
    ],
)
def test_a_refused_demotion_names_what_holds_nvme(
    tmp_path: Path, settings: dict[str, str], told: str, cure: str
) -> None:
    async def case(made: World) -> None:
        made.namespace("keeps", media="nvme", **settings)
        made.namespace("moves")
        await fill(made, b"keeps")
        inode = await made.make_file(b"moves/file", BYTES)
        assert made.ledger.tiers.holders(inode) == [made.ram]
        await made.dispatcher.demotion.move([made.tree.inode(inode.ino)])
        reason = made.dispatcher.breaker.reason
        assert reason.startswith("nothing is demoted: the NVMe tier has no room for ")
        assert f"namespace keeps has 4.0 MiB ({told}); {cure}, unlink files or give a la" in reason
        assert "pin" not in reason.replace(told, "").replace(cure, "")

    run(case, tmp_path, nvme=4 * MIB)


def test_a_refused_demotion_names_copies_of_what_ram_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, whatever the sizes are."""

    async def case(made: World) -> None:
        for number in range(4):
            await made.store(b"%d" % number, BYTES, made.fast)
            await made.demote(made.find(b"%d" % number).ino)
        for size in (MIB, MIB // 2):
            inode = await made.store(b"next-%d" % size, BYTES[:size], made.fast)
            await made.dispatcher.demotion.move([made.tree.inode(inode.ino)])
            reason = made.dispatcher.breaker.reason
            assert "namespace . has 4.0 MiB (copies of what ram has as well); give a" in reason
        assert [one.levelname for one in caplog.records if "is demoted" in one.getMessage()] == [
            "WARNING",
            "DEBUG",
        ]

    caplog.set_level("DEBUG")
    run(case, tmp_path, nvme=4 * MIB)
