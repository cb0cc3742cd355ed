"""Processes that live on one storage, one after the other, until they are killed."""

import json
import multiprocessing
import signal
import traceback
from pathlib import Path

import trio

from kvfs import failpoints
from tests.faults.scenarios import SCENARIOS, check_end, check_state, reset
from tests.unit.world import World

# RocksDB and trio have threads and locks that a fork leaves in pieces: each life is forked from a
# process that has imported everything and opened nothing.
_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload([__name__])
NEVER = 1_000_000
COUNT = f"catalog.commit=delay:0@{NEVER}"  # arms nothing, but counts
PATIENCE = 60.0  # s


class WrongError(AssertionError):
    """What a life found or did was not allowed."""


def live(storage: Path, scenario: str, faults: str = COUNT, *, at_start: str = "") -> bool:
    """One life: check what the one before has left, then the scenario. False if it was killed.

    `at_start` is armed while it starts, `faults` while the scenario runs. Raises WrongError.
    """
    report = storage / "report"
    report.unlink(missing_ok=True)
    process = _fork.Process(target=_live, args=(storage, scenario, faults, at_start))
    process.start()
    process.join(PATIENCE)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
        raise WrongError(f"{scenario} with {at_start} {faults}: still there after {PATIENCE} s")
    process.close()
    if report.exists():
        raise WrongError(f"{scenario} with {at_start} {faults}:\n{report.read_text()}")
    if code not in {0, -signal.SIGKILL}:
        raise WrongError(f"{scenario} with {at_start} {faults}: exit code {code}")
    return code == 0


def passed(storage: Path) -> dict[str, int]:
    """The points that the last life has passed, and how often."""
    found: dict[str, int] = json.loads((storage / "passed").read_text())
    return found


def _live(storage: Path, name: str, faults: str, at_start: str) -> None:
    try:
        _live_on(storage, name, faults, at_start)
    except BaseException:
        (storage / "report").write_text(traceback.format_exc())
        raise


def _live_on(storage: Path, name: str, faults: str, at_start: str) -> None:
    scenario = SCENARIOS[name]
    begun = storage / "begun"
    failpoints.arm(at_start)
    made = World(storage)
    failpoints.arm("")

    async def life() -> None:
        try:
            made.check()
            if begun.exists():
                await check_state(made, scenario, scenario.outcomes)
        except BaseException:
            print(f"(this is what the life before has left: {begun.read_text()})")
            raise
        await reset(made)
        await scenario.prepare(made)
        begun.write_text(faults)
        failpoints.arm(faults)
        await scenario.act(made)
        counted = dict(failpoints.passed)
        failpoints.arm("")
        (storage / "passed").write_text(json.dumps(counted))
        await check_state(made, scenario, scenario.outcomes[-1:])
        check_end(made, scenario)

    trio.run(life)
    made.stop()
