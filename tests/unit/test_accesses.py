"""Reading an access log."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from kvfs import preflight
from kvfs.errors import ConfigError
from kvfs.simulation.accesses import SHARES, Profile, read


def access(op: str, key: int, t: float, size: int = 100, **more: object) -> dict[str, Any]:
    found = {"op": op, "key": f"{key:x}", "parent": "0", "t": t, "path": f"n/d/{key}"}
    return found | ({} if op == "absent" else {"size": size}) | {"tier": "ram"} | more


def renamed(old: int, key: int, t: float, **more: object) -> dict[str, Any]:
    found = {"op": "rename", "key": f"{key:x}", "parent": "0", "t": t, "path": f"n/e/{key}"}
    return found | {"old_key": f"{old:x}", "old_namespace": "n"} | more


def described(*accesses: dict[str, Any]) -> dict[str, Any]:
    profile = Profile()
    for one in accesses:
        profile.add(one)
    return profile.describe()


def test_distances_are_those_of_an_lru_stack() -> None:
    dice = random.Random(11)
    print("seed 11")
    sizes = {key: dice.randrange(1, 1000) for key in range(40)}
    profile = Profile()
    stack: list[int] = []
    expected: list[int] = []
    for number in range(3000):
        key = min(int(dice.expovariate(0.1)), 39)
        what = "read" if key in stack and dice.random() < 0.9 else "write"
        if key in stack:
            at = stack.index(key)
            if what == "read":
                expected.append(sum(sizes[other] for other in stack[: at + 1]))
            del stack[at]
        stack.insert(0, key)
        profile.add(access(what, key, number, sizes[key]))
    assert list(profile.distances) == expected
    found = profile.describe()
    ordered = sorted(expected)
    for one, share in zip(found["sizes_for"], SHARES, strict=True):
        held = sum(distance <= one["bytes"] for distance in ordered)
        assert one["share"] == share
        assert held >= share * len(ordered)
        assert sum(distance < one["bytes"] for distance in ordered) < share * len(ordered)


def test_accesses_are_counted_by_kind_and_tier() -> None:
    found = described(
        access("absent", 1, 0.0),
        access("absent", 1, 0.1),
        access("write", 1, 0.2, 50),
        access("write", 2, 1.0, 150, parent="1", path="n/d/child"),
        access("read", 1, 2.0, 50),
        access("read", 2, 2.5, 150, parent="1", path="n/d/child", tier="nvme"),
        access("absent", 5, 3.0, path="other/x"),
        {"op": "lost", "t": 4.0, "count": 7},
        access("read", 9, 10.0, path="other/dir/9"),
    )
    assert (found["seconds"], found["reads"], found["writes"]) == (10.0, 3, 2)
    assert (found["misses"], found["lost_lines"]) == (3, 7)
    assert (found["hit_ratio"], found["reads_per_s"]) == (0.5, pytest.approx(0.3))
    assert found["most_reads_in_a_second"] == 2
    assert found["read_from"] == {"ram": 0.6667, "nvme": 0.3333}
    assert found["namespaces"]["n"] == {
        "reads": 2,
        "misses": 2,
        "writes": 2,
        "read_bytes": 200,
        "write_bytes": 200,
        "dropped": 0,
        "hit_ratio": 0.5,
    }
    assert found["written_sizes"] == {"p50": 50, "p90": 150, "p99": 150, "max": 150}
    assert (found["objects"], found["object_bytes"]) == (3, 300)
    assert found["reused"] == 0.6667
    assert found["reuse_after_s"]["max"] == 1.8
    prefixes = {one["path"]: (one["reads"], one["objects"]) for one in found["prefixes"]}
    assert prefixes == {"n/d": (1, 1), "n/d/1": (1, 1), "other/dir": (1, 1)}


def test_a_read_from_the_bucket_is_no_hit() -> None:
    found = described(
        access("read", 1, 0.0, 50, tier="s3"),
        access("read", 1, 1.0, 50),
        access("read", 2, 2.0, 50, tier="nvme"),
        access("absent", 3, 3.0),
    )
    assert (found["reads"], found["misses"], found["hit_ratio"]) == (3, 1, 0.5)
    assert found["namespaces"]["n"]["hit_ratio"] == 0.5


def test_objects_of_two_namespaces_with_one_key_are_two() -> None:
    found = described(
        access("write", 1, 0.0, 50, path="a/d/x"),
        access("write", 1, 1.0, 70, path="b/d/x"),
        access("read", 1, 2.0, 50, path="a/d/x"),
        access("read", 2, 3.0, 10, path="a/y", parent="1"),
        access("read", 2, 4.0, 10, path="b/y", parent="1"),
    )
    assert (found["objects"], found["object_bytes"]) == (4, 140)
    assert found["reuse_distance_bytes"]["max"] == 120
    prefixes = {one["path"]: (one["reads"], one["objects"]) for one in found["prefixes"]}
    assert prefixes == {"a/d": (1, 1), "a/d/x": (1, 1), "b/d/x": (1, 1)}


def test_a_renamed_object_is_the_same_object() -> None:
    """A writer of 3 objects writes each one 4 times: to a temporary name, which it renames."""
    accesses = []
    for turn in range(4):
        for key in (1, 2, 3):
            temporary = 10 * (turn + 1) + key
            accesses.append(access("write", temporary, turn, 100))
            accesses.append(renamed(temporary, key, turn))
    found = described(*accesses, access("read", 1, 5.0, 100), access("read", 2, 6.0, 100))
    assert (found["writes"], found["objects"], found["object_bytes"]) == (12, 3, 300)
    assert found["reuse_distance_bytes"]["max"] == 300


def test_a_rename_takes_the_reads_of_the_object_along() -> None:
    found = described(
        access("write", 1, 0.0, 50),
        access("read", 1, 1.0, 50),
        renamed(1, 2, 2.0, path="other/2"),
        access("read", 2, 3.0, 50, path="other/2"),
    )
    assert (found["objects"], found["reused"]) == (1, 1.0)
    assert found["prefixes"] == [{"path": "other", "reads": 2, "objects": 1}]


def test_a_rename_of_an_object_without_a_line_is_no_object() -> None:
    found = described(renamed(1, 2, 0.0), access("read", 3, 1.0, 50))
    assert (found["objects"], found["object_bytes"]) == (1, 50)


def test_an_empty_profile_is_all_zero() -> None:
    found = Profile().describe()
    assert (found["seconds"], found["hit_ratio"], found["sizes_for"]) == (0.0, 0.0, [])


def test_both_halves_are_read_and_a_torn_line_is_not(tmp_path: Path) -> None:
    older, newer = tmp_path / "log.1", tmp_path / "log"
    older.write_text(json.dumps(access("write", 1, 1.0)) + '\n{"op": "re\n')
    newer.write_text("\n" + json.dumps(access("read", 1, 2.0)) + '\n{"op"')
    assert [one["op"] for one in read(newer)] == ["write", "read"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello\n", "no JSON"),
        ("\0" * 2_000_000, "line 1 is longer than 1048576 bytes"),
        ("[]\n", "line 1 is no line of an access log"),
        ('{"op": "x"}\n', "op 'x', expected one of"),
        ('{"op": "read", "t": 1, "key": "zz", "parent": "0", "path": ""}\n', "line 1"),
        (json.dumps(access("read", 1, 1.0, -5)) + "\n", "size -5, expected bytes"),
        (json.dumps(access("read", 1, 1.0, path=5)) + "\n", "line 1"),
        (json.dumps(access("read", 1, math.nan)) + "\n", "t nan, expected seconds"),
        (json.dumps(access("read", 1, math.inf)) + "\n", "t inf, expected seconds"),
        (json.dumps(renamed(1, 2, 1.0, old_namespace=5)) + "\n", "old_namespace 5"),
        (json.dumps(renamed(1, 2, 1.0, old_key="x")) + "\n", "line 1"),
    ],
)
def test_malformed_access_log_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(ConfigError, match=why):
        list(read(tmp_path / "log"))


@pytest.mark.parametrize("op", ["read", "write", "rename", "absent", "lost"])
def test_a_log_that_begins_with_any_line_can_go_on(tmp_path: Path, op: str) -> None:
    line = {
        "rename": renamed(1, 2, 1.0),
        "lost": {"t": 1.0, "op": "lost", "count": 1},
    }.get(op) or access(op, 1, 1.0)
    (tmp_path / "log").write_text(json.dumps(line, separators=(",", ":")) + "\n")
    assert [one["op"] for one in read(tmp_path / "log")] == [op]
    preflight.check_access_file(tmp_path / "log")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        list(read(tmp_path / "none"))
