"""Rates between two looks, and the frame of `kvfs top` that shows them."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kvfs.cli.frame import SORTS, TopFrame, View
from kvfs.rates import Look, Opens, between, opens_of


def namespace(name: str, size: int = 0, **counters: int) -> dict[str, Any]:
    return {
        "name": name,
        "bytes": size,
        "objects": size // 10,
        "counters": counters,
        "hit_ratio_at": {"0.5": 0.25, "2": 0.75},
    }


def status(*namespaces: dict[str, Any], pid: int = 1, hits: int = 0, **more: int) -> dict[str, Any]:
    tier = {
        "capacity_bytes": 1000,
        "used_bytes": 250,
        "objects": 3,
        "hits": hits,
        "state": "healthy",
        "why": "",
    }
    bucket = {
        **tier,
        "capacity_bytes": 0,
        "dirty_objects": 7,
        "dirty_bytes": 2048,
        "oldest_dirty_s": 61.0,
        "uploads": more.pop("uploads", 0),
        "upload_bytes": 0,
        "failures": 0,
    }
    plain = ("jobs", "writers", "open_handles", "trash")
    return {
        "version": "1",
        "mountpoint": "/mnt/kv",
        "uptime_s": 90061.0,
        "takeovers": 0,
        "daemon_pid": pid,
        "keeper_pid": 9,
        "passthrough": {"on": True},
        "tiers": {"ram": tier, "s3": bucket},
        "counters": {"opens_passthrough": 0, **more},
        "namespaces": list(namespaces),
        **dict.fromkeys(plain, 0),
    }


def frame(*looks: dict[str, Any], objects: dict[str, Any] | None = None) -> TopFrame:
    """After these looks, two seconds apart."""
    found = TopFrame()
    for number, one in enumerate(looks):
        found = found.after(Look(2.0 * number, one), objects or {})
    return found


def drawn(found: TopFrame, width: int = 120, height: int = 40, view: View | None = None) -> str:
    console = Console(file=StringIO(), width=width, height=height, color_system=None)
    with console.capture() as text:
        console.print(found.render(view or View(), width, height))
    return text.get()


def test_rates_are_differences_a_second() -> None:
    before = status(namespace("a", read_ram=10, misses=5), hits=3, sealed=1, uploads=4)
    after = status(namespace("a", read_ram=16, read_s3=2, misses=7), hits=9, sealed=5, uploads=8)
    rates = between(Look(10.0, before), Look(12.0, after))
    assert rates is not None
    assert rates.flows["sealed"] == 2.0
    assert rates.flows["uploads"] == 2.0
    assert rates.hits["ram"] == 3.0
    assert rates.opens["a"] == Opens(3.0, 1.0, 1.0)
    assert rates.opens["a"].ratio == 0.6


def test_there_is_no_rate_between_two_daemons() -> None:
    assert between(Look(1.0, status(sealed=100)), Look(2.0, status(pid=2))) is None
    assert between(Look(1.0, status()), Look(1.0, status())) is None


def test_a_namespace_that_was_made_anew_begins_at_zero() -> None:
    before, after = namespace("a", read_ram=100), namespace("a", read_ram=4)
    rates = between(Look(0.0, status(before)), Look(1.0, status(after, namespace("b", misses=3))))
    assert rates is not None
    assert rates.opens == {"a": Opens(0, 0, 0), "b": Opens(0, 0, 3)}


def test_no_opens_have_no_ratio() -> None:
    assert opens_of(namespace("a")).ratio is None
    assert opens_of(namespace("a", read_nvme=1, read_s3=2, misses=1)).ratio == 0.25


def test_a_frame_shows_tiers_rates_and_namespaces() -> None:
    found = frame(
        status(namespace("small", 10), namespace("large", 4096)),
        status(namespace("small", 10, read_ram=8), namespace("large", 4096), sealed=10),
        objects={
            "order": "hot",
            "objects": [
                {"path": "a/x", "size": 2048, "opens": 5, "tiers": ["ram", "s3"], "dirty": True}
            ],
        },
    )
    text = drawn(found)
    assert "up 1 d 01:01:01" in text
    assert "sealed/s 5.0" in text
    assert "##........  25%" in text
    assert "7, 2.0 KiB" in text  # dirty
    assert text.index("large") < text.index("small")
    assert "100.0%" in text
    assert "75.0%" in text  # with twice the room
    assert "ram+s3" in text
    by_name = drawn(found, view=View(sort="name", reverse=True))
    assert by_name.index("small") < by_name.index("large")


@pytest.mark.parametrize("width", [20, 44, 80, 200])
@pytest.mark.parametrize("sort", SORTS)
def test_a_frame_fits_its_terminal(width: int, sort: str) -> None:
    many = [namespace(f"namespace-{number}", number) for number in range(100)]
    found = frame(status(*many), status(*many), objects={"order": "hot", "objects": []})
    lines = drawn(found, width, 24, View(sort=sort, first=95)).splitlines()
    assert max(map(len, lines)) <= width
    if width >= 44:  # narrower ones have the rates in many lines
        assert len(lines) <= 24
        assert " of 100" in "\n".join(lines)


def test_frame_without_an_answer_keeps_the_last_figures() -> None:
    found = frame(status(namespace("a"), sealed=1), status(namespace("a"), sealed=9))
    text = drawn(found.without_answer(10.0, "refused").without_answer(13.0, "no daemon answers"))
    assert "no answer for 3 s, perhaps a takeover: no daemon answers" in text
    assert "sealed/s -" in text
    assert "ram" in text
    back = found.without_answer(10.0, "refused").after(Look(15.0, status(namespace("a"))), {})
    assert "no answer" not in drawn(back)


def test_names_are_no_markup_and_leave_their_line_alone() -> None:
    text = drawn(frame(status(namespace("[red]x\n\x1b[2J"))))
    assert r"[red]x\n\x1b[2J" in text
