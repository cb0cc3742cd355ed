"""The verdict of `kvfs bench` on an engine's speed, and the loop behind it."""

from pathlib import Path
from typing import Any

import pytest

from kvfs.cli import engine_loop
from kvfs.errors import KvfsError


def engine(speed: float, entry: float) -> dict[str, Any]:
    side = {"open_and_fstat_p50_s": entry, "open_and_fstat_p99_s": 0.001, "read_p50_s": 0.0007}
    return {"speed": speed, "mount": side, "beside": side}


def status(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 (a status has values of all kinds)
    found: dict[str, Any] = {
        name: {"on": True, "why": ""} for name in ("passthrough", "fast_open", "huge_pages")
    }
    return {**found, "tiers": {"ram": {"hits": 9}, "nvme": {"hits": 1}}, **changes}


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))


def test_verdict_names_the_speed_and_both_times() -> None:
    said = engine_loop.verdict(engine(1.24, 0.000123), "/dev/shm")
    assert said.startswith("Loads get 1.2 of the speed of /dev/shm: open and fstat take 123 us")
    assert "(99 %: 1000 us)" in said


def test_a_fast_mount_needs_no_cure() -> None:
    off = {"on": False, "why": "turned off: mount with fast_open=on"}
    assert engine_loop.cures(engine(1.0, 0.0001), status(fast_open=off)) == []


@pytest.mark.parametrize("found", [engine(0.5, 0.0001), engine(1.0, 0.0006)])
def test_a_slow_mount_gets_the_reason_of_each_part_that_is_off(found: dict[str, Any]) -> None:
    fast = {"on": False, "why": "turned off: mount with fast_open=on"}
    passing = {"on": False, "why": "needs root"}
    assert engine_loop.cures(found, status(fast_open=fast, passthrough=passing)) == [
        "passthrough is off: needs root",
        "fast_open is off: turned off: mount with fast_open=on",
    ]


def test_a_slow_mount_without_ram_or_under_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (10_000.0, 0.0, 0.0))
    said = engine_loop.cures(engine(0.5, 0.0001), status(tiers={"nvme": {"hits": 1}}))
    assert [one.partition(":")[0].partition(" on")[0] for one in said] == [
        "objects are",
        "the load is 10000.0",
    ]


def test_a_slow_mount_where_nothing_is_off_points_to_the_document() -> None:
    (said,) = engine_loop.cures(engine(0.5, 0.0001), status())
    assert "docs/troubleshooting.md" in said


def test_opens_of_objects_on_nvme_ask_for_more_ram() -> None:
    tiers = {"ram": {"hits": 10}, "nvme": {"hits": 90}}
    (said,) = engine_loop.cures(engine(1.0, 0.0001), status(tiers=tiers))
    assert said.endswith("give more ram=")


def test_the_loop_measures_every_call_and_refuses_a_wrong_byte(tmp_path: Path) -> None:
    loop = engine_loop.Loop(tmp_path, 2)
    loop.write()
    work = engine_loop.Work()
    try:
        loop.turn(work)
        assert {len(seconds) for seconds in loop.seconds.values()} == {2}
        path = tmp_path / "engine-1"
        with path.open("r+b") as file:
            last = path.read_bytes()[-1]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))
        with pytest.raises(KvfsError, match="engine-1: the bytes differ"):
            loop.turn(work)
    finally:
        work.close()
    loop.unlink()
    assert list(tmp_path.iterdir()) == []
