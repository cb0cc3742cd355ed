"""Rates between two looks, and the frame of `kvfs top` that shows them."""

import errno
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kvfs import errors
from kvfs.cli.frame import SORTS, TopFrame, View
from kvfs.fuse.errnos import ERRNO
from kvfs.rates import (
    ERRORS,
    Bandwidth,
    Look,
    Opens,
    between,
    errors_of,
    eviction_of,
    opens_of,
    quota_share,
    reserved_of,
    sample_of,
    taken_share,
)


def namespace(name: str, size: int = 0, **counters: int) -> dict[str, Any]:
    return {
        "name": name,
        "bytes": size,
        "staging_bytes": 0,
        "objects": size // 10,
        "counters": counters,
        "hit_ratio_at": {"0.5": 0.25, "2": 0.75},
        "following": "",
        "settings": {
            "quota_hard": "4K",
            "quota_objects": "0",
            "eviction": "adaptive",
            "pin": "off",
        },
    }


def status(*namespaces: dict[str, Any], pid: int = 1, hits: int = 0, **more: int) -> dict[str, Any]:
    tier = {
        "capacity_bytes": 1000,
        "used_bytes": 250,
        "reserved_bytes": 0,
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
        "errors": {},
        "latencies": {"bounds_s": [0.001, 0.01], "open": {}},
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


def test_top_tells_that_the_mount_is_detached() -> None:
    told = "the mount is detached: its daemon ends after the last close of a file"
    assert told in drawn(frame(status() | {"state": "detached"}))
    assert told not in drawn(frame(status() | {"state": "mounted"}))


def pool(**counters: int) -> dict[str, Any]:
    names = ("found", "fetched", "fetched_bytes", "served", "served_bytes", "conflicts")
    return {
        "index": {"up": False, "why": "it does not answer"},
        "serves": True,
        "nodes_live": 3,
        "lag_s": 1.5,
        "hits": counters.get("fetched", 0),
        "objects": 5,
        "bytes": 5000,
        "counters": dict.fromkeys(names, 0) | counters,
    }


def test_opens_by_fetches_from_other_nodes_are_their_own_kind() -> None:
    before = status(namespace("a", read_ram=10)) | {"pool": pool()}
    after = status(namespace("a", read_ram=12, read_pool=6)) | {
        "pool": pool(fetched=6, fetched_bytes=6 << 20, served_bytes=2 << 20)
    }
    rates = between(Look(10.0, before), Look(12.0, after))
    assert rates is not None
    assert rates.hits == {"ram": 0.0, "s3": 0.0, "pool": 3.0}
    assert (rates.opens["a"].opened, rates.opens["a"].ratio) == (4.0, 0.25)
    assert (rates.flows["fetched_bytes"], rates.flows["served_bytes"]) == (3 << 20, 1 << 20)


def test_hit_ratio_with_the_opens_that_other_nodes_serve() -> None:
    opens = opens_of(namespace("a", read_ram=50, read_pool=30, read_s3=10, misses=10))
    assert opens.ratio == 0.5
    assert opens.with_other_nodes(0.5) == pytest.approx(0.8)
    assert opens.with_other_nodes(0.25) == pytest.approx(0.25 + 0.75 * 0.6)
    assert opens.with_other_nodes(1.0) == 1.0
    assert Opens(hits=5).with_other_nodes(0.5) == 0.5
    assert Opens().with_other_nodes(0.5) == 0.5


def test_top_shows_the_pool() -> None:
    before, after = status() | {"pool": pool()}, status() | {"pool": pool(served_bytes=2 << 20)}
    shown = " ".join(drawn(frame(before, after)).split())
    assert "pool 3 nodes index down" in shown
    assert "served 1.0 MiB/s" in shown
    assert "lag 1.5 s conflicts 0" in shown
    assert "index" not in drawn(frame(status()))
    begun = pool() | {"index": {"up": False, "why": "it was not asked yet", "asked": False}}
    assert "index not asked yet" in " ".join(drawn(frame(status() | {"pool": begun})).split())


def test_top_shows_the_pool_of_an_earlier_daemon() -> None:
    early = pool()
    del early["nodes_live"], early["hits"], early["counters"]["served"]
    assert "pool - nodes" in drawn(frame(status() | {"pool": early}))


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


def test_bandwidth_is_of_opened_and_written_bytes() -> None:
    before = namespace("a", read_bytes=1000, written_bytes=50)
    after = namespace("a", read_bytes=5000, written_bytes=150)
    rates = between(Look(0.0, status(before)), Look(2.0, status(after, namespace("b"))))
    assert rates is not None
    assert rates.bandwidth == {"a": Bandwidth(2000, 50), "b": Bandwidth(0, 0)}
    assert rates.flows["opened_bytes"] == 2000
    assert rates.flows["written_bytes"] == 50


def test_open_times_are_the_bounds_that_the_opens_between_two_looks_kept() -> None:
    def look(at: float, **counts: list[int]) -> Look:
        opens = {tier: {"counts": found} for tier, found in counts.items()}
        return Look(at, status() | {"latencies": {"bounds_s": [0.001, 0.01], "open": opens}})

    before = look(0.0, ram=[5, 90, 0])
    rates = between(before, look(1.0, ram=[65, 120, 0], nvme=[0, 0, 10]))
    assert rates is not None
    assert rates.open_times == (0.001, float("inf"))  # 60, 30 and 10 of 100
    rates = between(before, look(1.0, ram=[5, 190, 0]))
    assert rates is not None
    assert rates.open_times == (0.01, 0.01)
    rates = between(before, before._replace(at=1.0))
    assert rates is not None
    assert rates.open_times == ()


def test_errors_have_the_errno_that_clients_see() -> None:
    for name, classes in ERRORS.items():
        for one in classes:
            assert errno.errorcode[ERRNO[getattr(errors, one)]] == name
    by_operation = {
        "write": {"NoSpaceError": 2, "QuotaError": 1},
        "create": {"NoSpaceError": 3, "UserLimitError": 4},
        "lookup": {"NotFoundError": 9},
    }
    found = errors_of(status() | {"errors": by_operation})
    assert found == {"ENOSPC": 5, "EDQUOT": 5, "EIO": 0}


def test_quota_share_is_the_larger_of_bytes_and_objects() -> None:
    assert quota_share(namespace("a", 1024)) == 0.25
    full = namespace("a", 1024)
    full["settings"] |= {"quota_objects": "102"}
    assert quota_share(full) == 1.0
    full["settings"] |= {"quota_hard": "0", "quota_objects": "0"}
    assert quota_share(full) is None
    writing = namespace("a", 1024) | {"staging_bytes": 1024}
    assert quota_share(writing) == 0.5


def test_files_that_are_being_written_fill_their_tier_and_namespace() -> None:
    found = status(namespace("hog") | {"staging_bytes": 3072})
    tier = found["tiers"]["ram"]
    assert taken_share(tier) == 0.25
    tier["reserved_bytes"] = 500
    assert (reserved_of(tier), taken_share(tier)) == (500, 0.75)
    assert "##++++++..  75%" in drawn(frame(found))
    tier["reserved_bytes"] = 1500  # more than there is: sizes are guesses
    assert (reserved_of(tier), taken_share(tier)) == (750, 1.0)
    text = drawn(frame(found), 80)
    assert "++ 100%  250 B     750 B    1000 B" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("hog"))
    assert row[:6] == ["hog", "0", "B", "3.0", "KiB", "75.0%"]


def test_a_pin_is_shown_with_the_policy() -> None:
    one = namespace("keep") | {"following": "lru"}
    assert eviction_of(one) == "adaptive (lru)"
    one["settings"] |= {"pin": "on"}
    assert eviction_of(one) == "adaptive (lru), pin"
    assert "adaptive (lru), pin" in drawn(frame(status(one)))


def test_a_frame_shows_bandwidth_errors_quota_and_events() -> None:
    before = namespace("a", 1024, read_ram=1)
    after = namespace("a", 1024, read_ram=3, read_bytes=2 << 30, written_bytes=8 << 20)
    opens = {"bounds_s": [0.001, 0.01], "open": {"ram": {"counts": [0, 2, 0]}}}
    refused = {"write": {"QuotaError": 3}}
    events = (
        {"time": 0.0, "kind": "log", "level": "WARNING", "source": "x", "text": "first"},
        {"time": 1.0, "kind": "tier", "name": "nvme", "before": "healthy", "now": "down"},
    )
    found = TopFrame().after(Look(0.0, status(before)), {})
    second = status(after) | {"latencies": opens, "errors": refused}
    text = drawn(found.after(Look(2.0, second), {}, events), 200)
    assert "opens/s 1.0 (1.0 GiB/s)" in text
    assert "written 4.0 MiB/s" in text
    assert "open p50, p99 <10 ms <10 ms" in text
    assert "EDQUOT 3" in text
    assert "25.0%" in text
    assert text.index("tier name nvme, before healthy, now down") < text.index("WARNING first")


def test_long_events_take_the_free_lines() -> None:
    cure = "give the namespace more room, or pin=off"
    events = tuple(
        {"time": 1.0, "kind": "log", "level": "WARNING", "text": f"{n} {'word ' * 30}: {cure}"}
        for n in range(3)
    )
    found = TopFrame().after(Look(0.0, status(namespace("a"))), {}, events)
    roomy = drawn(found, 80, 24)
    assert len(roomy.splitlines()) <= 24
    assert " ".join(roomy.split()).count(cure) == 3
    assert roomy.index("WARNING 2") < roomy.index("WARNING 1") < roomy.index("WARNING 0")
    assert "WAR" in drawn(found, 20, 9)
    assert drawn(found, 5, 5)
    many = TopFrame().after(Look(0.0, status(*(namespace(f"n{n}") for n in range(40)))), {}, events)
    tight = drawn(many, 80, 24).splitlines()
    assert len(tight) <= 24
    assert sum(one.rstrip().endswith("…") for one in tight) == 3


def test_accesses_of_the_sample_are_shown_before_its_ratios() -> None:
    one = namespace("a") | {"hit_ratio_at": {}, "hit_ratio_sample": {"seen": 120, "needed": 400}}
    assert "120 of 400" in drawn(frame(status(one)), 180)
    assert sample_of(one) == "120 of 400"
    assert sample_of(one | {"hit_ratio_at": {"1": 0.5}}) == ""


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
    text = drawn(found, 160)
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


def test_frame_without_an_answer_keeps_the_last_figures_and_tells_their_age() -> None:
    found = frame(status(namespace("a"), sealed=1), status(namespace("a"), sealed=9))
    assert found.look is not None
    answered = found.look.at
    first = found.without_answer(answered + 5, "refused")
    assert "last answer 5 s ago, perhaps a takeover: refused" in drawn(first)
    text = drawn(first.without_answer(answered + 8, "no daemon answers"))
    assert "last answer 8 s ago, perhaps a takeover: no daemon answers" in text
    assert "sealed/s -" in text
    assert "ram" in text
    back = first.after(Look(answered + 10, status(namespace("a"))), {})
    assert "last answer" not in drawn(back)


def test_names_are_no_markup_and_leave_their_line_alone() -> None:
    text = drawn(frame(status(namespace("[red]x\n\x1b[2J"))))
    assert r"[red]x\n\x1b[2J" in text
