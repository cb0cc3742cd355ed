"""Processes that use one storage, one after the other, until they are killed."""

import json
import multiprocessing
import signal
import traceback
from pathlib import Path

import trio

from kvfs import failpoints
from kvfs.tiers import tier
from tests.faults.scenarios import SCENARIOS, check_end, check_state, reset, world_of

# RocksDB and trio have threads and locks that a fork leaves in pieces: each life is forked from a
# process that has imported everything and opened nothing.
_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload([__name__])
NEVER = 1_000_000
COUNT = f"catalog.commit=delay:0@{NEVER}"  # arms nothing, but counts
PATIENCE = 60.0  # s


class WrongError(AssertionError):
    """A life found or did something that is not allowed."""


def live(
    storage: Path,
    scenario: str,
    faults: str = COUNT,
    *,
    at_start: str = COUNT,
    outcomes: int | None = None,
) -> bool:
    """One life: check the storage after the last life, then run the scenario. False if killed.

    `at_start` is armed while it starts, `faults` while the scenario runs. `outcomes`: how many of
    the scenario's outcomes are allowed. Raises WrongError.
    """
    report = storage / "report"
    report.unlink(missing_ok=True)
    process = _fork.Process(target=_live, args=(storage, scenario, faults, at_start, outcomes))
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


def passed(storage: Path, when: str = "acting") -> dict[str, int]:
    """The points that the last life passed while `acting` or `starting`, and how often."""
    found: dict[str, int] = json.loads((storage / when).read_text())
    return found


def _live(storage: Path, name: str, faults: str, at_start: str, outcomes: int | None) -> None:
    tier.FANOUT = 4  # 256 directories to be looked into take a quarter of a life
    try:
        _live_on(storage, name, faults, at_start, outcomes)
    except BaseException:
        (storage / "report").write_text(traceback.format_exc())
        raise


def _live_on(storage: Path, name: str, faults: str, at_start: str, outcomes: int | None) -> None:
    scenario = SCENARIOS[name]
    begun = storage / "begun"
    failpoints.arm(at_start)
    made = world_of(storage, scenario)
    (storage / "starting").write_text(json.dumps(failpoints.passed))
    failpoints.arm("")

    async def life() -> None:
        made.check()
        if begun.exists():
            try:
                await check_state(made, scenario, scenario.outcomes[:outcomes])
            except AssertionError as error:
                raise AssertionError(f"left by the life with {begun.read_text()}") from error
        await reset(made)
        await scenario.prepare(made)
        begun.write_text(faults)
        failpoints.arm(faults)
        await scenario.act(made)
        (storage / "acting").write_text(json.dumps(failpoints.passed))
        failpoints.arm("")
        await check_state(made, scenario, scenario.outcomes[-1:])
        check_end(made, scenario)

    trio.run(life)
    made.stop()
