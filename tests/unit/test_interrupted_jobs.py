"""Ctrl-C cancels each job that a daemon has begun, whenever it comes."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from kvfs.cli import jobs
from kvfs.cli.jobs import AT_ONCE, Jobs
from kvfs.cli.screen import counting

ANSWER = {"over": False, "files": 3}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_ctrl_c_while_a_daemon_begins_a_job(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Two requests begin two jobs, and the third one asks for progress."""
    asked: list[dict[str, Any]] = []

    def request(_: Path, verb: str, **how: object) -> dict[str, Any]:
        asked.append({"verb": verb, **how})
        if len(asked) == at:
            signal.raise_signal(signal.SIGINT)
        return {"job": len(asked)} if "inos" in how else ANSWER

    monkeypatch.setattr(jobs, "request", request)
    place = SimpleNamespace(mountpoint=Path("/mnt/kv"), ino=7)
    monkeypatch.setattr(jobs, "on_mount", lambda _: place)
    begun = Jobs(["a"] * (AT_ONCE + 1), "warm", "warmed")
    with pytest.raises(click.exceptions.Exit) as ended:
        begun.follow(counting(), lambda _: {}, lambda _: "")
    assert ended.value.exit_code == 130
    cancelled = [one["job"] for one in asked if one.get("cancel")]
    assert cancelled == list(range(1, min(at, 2) + 1))
    assert {one["verb"] for one in asked if one.get("cancel")} == {"warmed"}
