"""Fail points: what can be armed, what it does, and what is refused."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs import failpoints
from kvfs.errors import ConfigError


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_no_fail_point_is_armed_by_default() -> None:
    assert not failpoints.active


def test_an_error_comes_at_the_nth_passing_only() -> None:
    failpoints.arm("tiers.create=raise:ENOSPC@2; tiers.unlink=raise:EIO")
    failpoints.reach("tiers.create")
    with pytest.raises(OSError, match=r"tiers\.create") as caught:
        failpoints.reach("tiers.create")
    assert caught.value.errno == errno.ENOSPC
    failpoints.reach("tiers.create")
    with pytest.raises(OSError, match=r"tiers\.unlink") as caught:
        failpoints.reach("tiers.unlink")
    assert caught.value.errno == errno.EIO
    assert failpoints.passed == {"tiers.create": 3, "tiers.unlink": 1}


def test_a_delay_takes_its_time() -> None:
    failpoints.arm("catalog.commit=delay:0.05")
    begun = time.monotonic()
    failpoints.reach("catalog.commit")
    assert time.monotonic() - begun >= 0.05


def test_arming_again_replaces_earlier_fail_points() -> None:
    failpoints.arm("tiers.create=raise:EIO@2")
    failpoints.reach("tiers.create")
    failpoints.arm("tiers.rename=raise:EIO")
    failpoints.reach("tiers.create")
    failpoints.arm("")
    assert not failpoints.active
    assert not failpoints.passed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tiers.made=kill", r"tiers\.made.*no fail point.*tiers\.create, "),
        ("tiers.create", "no such action.*kill, delay:SECONDS or raise:ERRNO"),
        ("tiers.create=explode", "explode.*no such action"),
        ("tiers.create=raise:ENOSUCH", "ENOSUCH.*no such action"),
        ("tiers.create=delay:long", "no such action"),
        ("tiers.create=kill:9", "no such action"),
        ("tiers.create=kill@0", "passing '0', expected 1, 2, 3"),
        ("tiers.create=kill@soon", "passing 'soon'"),
        ("catalog.committed=raise:EIO", "behind a change"),
    ],
)
def test_malformed_fail_point_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        failpoints.arm(text)
    assert not failpoints.active


def test_unregistered_fail_point_is_a_key_error() -> None:
    with pytest.raises(KeyError, match=r"tiers\.made"):
        failpoints.reach("tiers.made")


def test_every_registered_point_is_in_the_source() -> None:
    source = "".join(path.read_text() for path in Path(kvfs.__file__).parent.rglob("*.py"))
    assert set(re.findall(r"failpoints\.reach\(\s*\"([^\"]+)\"", source)) == set(failpoints.POINTS)


def run(value: str, program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", f"from kvfs import failpoints\n{program}"],
        env={**os.environ, failpoints.VARIABLE: value},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_environment_arms_it_and_a_kill_is_sudden() -> None:
    program = (
        "for number in range(5):\n print(number, flush=True)\n failpoints.reach('catalog.commit')"
    )
    done = run("catalog.commit=kill@3", program)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1", "2"]


def test_an_environment_that_means_nothing_is_refused_at_import() -> None:
    done = run("catalog.comit=kill", "")
    assert done.returncode == 1
    assert "KVFS_FAILPOINTS: 'catalog.comit=kill' names no fail point" in done.stderr
