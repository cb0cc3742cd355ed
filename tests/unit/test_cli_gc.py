"""How `kvfs gc` tells what it found, and with which exit code."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvfs import gc
from kvfs.cli import main

FOUND: dict[str, Any] = {
    "place": "s3://bucket/p/",
    "nodes": [
        {
            "identity": "aaaa",
            "host": "gpu\n7",
            "mountpoint": "/mnt/kv",
            "age_s": 31.5 * 86400,
            "stale": True,
            "forgotten": False,
            "namespaces": ["x@2"],
        },
        {
            "identity": "bbbb",
            "host": "gpu8",
            "mountpoint": "/mnt/\udcff",
            "age_s": 90.0,
            "stale": False,
            "forgotten": True,
            "namespaces": [],
        },
    ],
    "unread": {"cccc": "is no record"},
    "listed": {"objects": 12, "bytes": 2048},
    "kept": {"live": {"objects": 5, "bytes": 5}, "nameless": {"objects": 1, "bytes": 1}},
    "garbage": {"version": {"objects": 2, "bytes": 1024}, "upload": {"objects": 1, "bytes": 0}},
    "namespaces": [
        {
            "name": "x@1",
            "kind": "version",
            "explained": False,
            "recent": True,
            "objects": 2,
            "bytes": 1024,
        }
    ],
    "withheld": {"aside": {"objects": 1, "bytes": 3}},
    "examples": ["p/%/\x1b"],
    "delete": False,
    "deleted": {"objects": 0, "bytes": 0},
    "failures": 0,
    "failed": [],
}


def run(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], *options: str) -> Result:
    def collect(target: Path | None, options: str, _tell: object, **told: object) -> dict[str, Any]:
        assert (target, options) == (None, "s3=s3://bucket/p,s3_profile=me")
        assert told["older_than"] == 86400
        assert told["node_age"] == 30 * 86400
        return found

    monkeypatch.setattr(gc, "run", collect)
    arguments = ["gc", "-o", "s3=s3://bucket/p", "-o", "s3_profile=me", *options]
    return CliRunner().invoke(main, arguments, prog_name="kvfs")


def test_report_lists_garbage_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, FOUND)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        "s3://bucket/p/: 12 objects (2.0 KiB), 2 nodes",
        (
            "node aaaa (gpu\\n7:/mnt/kv), seen 31 d ago, has x@2; stale: --forget-node if it is "
            "gone for good"
        ),
        "node bbbb (gpu8:/mnt/\\udcff), seen 90 s ago; forgotten",
        "node cccc: is no record",
        "x@1: no node uses it: 2 (1.0 KiB), written to recently, no node record explains it",
        "garbage: 2 (1.0 KiB) of versions of namespaces that no node uses any more",
        "garbage: 1 (0 B) uploads that were not completed",
        (
            "withheld: 1 (3 B) of exchanged names: a node without a sign of life since then may "
            "use them"
        ),
        "kept: 1 (1 B) at a hash whose name is lost: a program that knows the name finds them",
        "  'p/%/\\x1b'",
        "3 objects (1.0 KiB) are garbage: --delete deletes them",
    ]


def test_programs_get_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(run(monkeypatch, FOUND, "--json").stdout) == FOUND


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_failed_deletes_end_with_an_error(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    found = copy.deepcopy(FOUND) | {"delete": True, "failures": 2, "failed": ["b/k: away"]}
    result = run(monkeypatch, found, "--delete", *options)
    assert result.exit_code == 1
    assert ("2 objects are not deleted: b/k: away" in result.stderr) == (not options)


def test_no_garbage_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, FOUND | {"garbage": {}})
    assert result.stdout.endswith("there is no garbage\n")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([""], "the target is empty"),
        (["/usr"], "/usr is neither a mount point of kvfs"),
        (["--older-than", "-1d"], "option --older-than=-1d: expected a duration"),
        ([], "no bucket: give MOUNTPOINT"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(main, ["gc", *arguments], prog_name="kvfs")
    assert result.exit_code == 2
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
