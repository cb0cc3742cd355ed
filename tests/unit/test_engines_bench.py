"""The benchmark of engines: its content shows every wrong byte, and its ratios are of pairs."""

from pathlib import Path

import pytest
import torch

from scripts.bench import beside
from scripts.bench.connectors import Entry
from scripts.bench.drivers.driver import Content, WrongBytesError
from scripts.bench.drivers.loop import Resident
from scripts.bench.engines import Found, judged
from scripts.bench.mounted import Failed


def test_content_of_the_engines_benchmark_differs_by_number_and_in_every_byte() -> None:
    content = Content(4096)
    memory = torch.zeros(4096, dtype=torch.uint8)
    content.fill(memory, 7)
    with pytest.raises(WrongBytesError):
        content.check(memory.clone(), 8)
    for at in (0, 2047, 4095):
        wrong = memory.clone()
        wrong[at] ^= 1
        with pytest.raises(WrongBytesError):
            content.check(wrong, 7)
    content.check(memory, 7)
    assert not memory.any(), "what was checked cannot be taken for the next object"


def test_rates_and_times_of_the_engines_benchmark() -> None:
    entry = Entry("one", "module", "Driver", 10**9)
    found = Found(entry, 2)
    for side, seconds in (("kvfs", (1.0, 2.0, 4.0)), ("passthrough_hp", (1.0, 1.0, 8.0))):
        for each in seconds:
            found.add(side, {"get": [each / 2, each / 2]})
    (row,) = found.rows(["kvfs", "passthrough_hp"])
    assert row["value"] == {"kvfs": 1.0, "passthrough_hp": 2.0}
    assert row["ratio"] == {"kvfs": 1.0, "passthrough_hp": 1.0}  # of pairs: 1, 1/2 and 2
    (bar,) = judged([row])
    assert (bar["bar"], bar["holds"]) == ("one get", "yes")

    times = Found(Entry("loop", "module", "Driver", 1, reads=True), 2)
    for side, factor in (("kvfs", 2e-6), ("passthrough_hp", 1e-6)):
        for most in (10, 30):
            times.add(side, {"open": [1 * factor, most * factor, 1 * factor]})
    median, last = times.rows(["kvfs", "passthrough_hp"])
    assert (median["what"], last["what"]) == ("open, p50", "open, p99")
    assert last["value"] == pytest.approx({"kvfs": 60, "passthrough_hp": 30})
    assert last["ratio"]["passthrough_hp"] == pytest.approx(2)
    assert [bar["holds"] for bar in judged([median, last])] == ["NO", "NO"]


def test_a_load_that_moves_nothing_beside_the_loop_fails() -> None:
    found = beside.Found("movers")
    found.add_moved("kvfs", {"demoted": 1, "promoted": 1}, {"demoted": 3, "promoted": 2})
    found.add_moved("kvfs", {"demoted": 3, "promoted": 2}, {"demoted": 4, "promoted": 9})
    assert found.moved == {"kvfs": {"demoted": 3, "promoted": 8}}
    with pytest.raises(Failed, match="no bytes were promoted while the loop ran on kvfs"):
        found.add_moved("kvfs", {"demoted": 1, "promoted": 1}, {"demoted": 2, "promoted": 1})


def test_times_beside_a_load_are_compared_with_idle_times() -> None:
    found = beside.Found("movers")
    for side, factor in (("kvfs", 4), ("passthrough_hp", 2)):
        found.add(side, "idle", {one: [1e-6, 1e-6, 2e-6] for one in beside.CALLS})
        found.add(side, "busy", {one: [1e-6, 1e-6, factor * 2e-6] for one in beside.CALLS})
        found.add_moved(side, {"demoted": 0}, {"demoted": 5})
    rows = found.rows(["kvfs", "passthrough_hp"])
    assert [(row["call"], row["side"]) for row in rows[:2]] == [
        ("open", "kvfs"),
        ("open", "passthrough_hp"),
    ]
    assert rows[0]["ratio"] == pytest.approx({"p50": 1, "p99": 4})
    assert rows[1]["ratio"] == pytest.approx({"p50": 1, "p99": 2})
    assert rows[0]["moved_bytes"] == {"demoted": 5}
    bars = beside.judged(rows)
    assert [bar["holds"] for bar in bars] == ["NO"] * len(beside.CALLS)


def test_resident_files_are_written_once(tmp_path: Path) -> None:
    loop = Resident(4096)
    assert loop.turn(tmp_path, range(2)) == {}
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    found = loop.turn(tmp_path, range(2))
    assert {call: len(found[call]) for call in beside.CALLS} == {
        "open": 2,
        "fstat": 2,
        "open after a copy": 4,
    }
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    next(iter(written)).write_bytes(bytes(4096))
    with pytest.raises(WrongBytesError):
        loop.turn(tmp_path, range(2))
