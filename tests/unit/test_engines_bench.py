"""The benchmark of engines: its content shows every wrong byte, and its ratios are of pairs."""

import pytest
import torch

from scripts.bench.connectors import Entry
from scripts.bench.drivers.driver import Content, WrongBytesError
from scripts.bench.engines import Found, judged


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
