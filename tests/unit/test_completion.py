"""Completion of values, by click's own interface and by a real bash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from kvfs import runtime
from kvfs.cli import main
from kvfs.config import Config
from kvfs.parsing import rows
from kvfs.settings import Settings

ROOT = Path(__file__).parents[2]


def offered(*words: str) -> list[tuple[str, str]]:
    """The type and value of each item for the last word, which is not written to its end."""
    *args, incomplete = words
    found = ShellComplete(main, {}, "kvfs", "_KVFS_COMPLETE").get_completions(args, incomplete)
    return [(item.type, item.value) for item in found]


def plain(*words: str) -> list[str]:
    found = offered(*words)
    assert {kind for kind, _ in found} <= {"plain"}
    return [value for _, value in found]


@pytest.mark.parametrize(
    "command",
    [
        *("mount", "umount", "get", "set", "remount", "export", "import"),
        *("status", "top", "upgrade", "flush", "bench", "fsck", "gc", "ns list", "replay trace"),
        "bench --against",
    ],
)
def test_a_mount_point_is_a_directory(command: str) -> None:
    assert offered(*command.split(), "/mn") == [("dir", "/mn")]


@pytest.mark.parametrize(
    "command",
    [
        *("stat", "du", "evict", "warm", "pin", "profile", "simulate", "replay", "import /mnt/kv"),
        *("doctor --bundle", "simulate trace --plot", "export /mnt/kv -o", "match ns --tokens"),
    ],
)
def test_a_path_is_a_file(command: str) -> None:
    assert offered(*command.split(), "/mnt/kv/a") == [("file", "/mnt/kv/a")]


def test_o_of_mount_has_all_options_and_flags() -> None:
    names = {f"{row.name}=" for row in rows(Config) if row.name != "mount_flags"}
    assert names < set(plain("mount", "/mnt/kv", "-o", ""))
    assert plain("mount", "/mnt/kv", "-o", "nv") == ["nvme=", "nvme_size=", "nvme_writes="]
    assert plain("mount", "/mnt/kv", "-o", "noa") == ["noatime"]


def test_o_completes_behind_the_last_comma_and_repeats_no_option() -> None:
    found = plain("mount", "/mnt/kv", "-o", "nvme=/data,nv")
    assert found == ["nvme=/data,nvme_size=", "nvme=/data,nvme_writes="]


def test_values_that_are_words_are_offered() -> None:
    assert plain("mount", "/mnt/kv", "-o", "ram=1G,passthrough=o") == [
        "ram=1G,passthrough=on",
        "ram=1G,passthrough=off",
    ]
    assert plain("mount", "/mnt/kv", "-o", "allow_other=") == ["allow_other=on", "allow_other=off"]
    assert plain("mount", "/mnt/kv", "-o", "ram=") == []
    assert plain("set", "/mnt/kv", "log_level=w") == ["log_level=warning"]


def test_set_upgrade_and_remount_offer_what_they_can_change() -> None:
    hot = {f"{row.name}=" for row in rows(Config) if row.hot}
    later = {f"{row.name}=" for row in rows(Config) if row.upgrade}
    assert set(plain("set", "/mnt/kv", "")) == hot
    assert set(plain("upgrade", "/mnt/kv", "-o", "")) == later
    assert set(plain("remount", "/mnt/kv", "-o", "")) > later
    assert {"ro", "rw"} < set(plain("remount", "/mnt/kv", "-o", ""))
    assert "promote_after=" not in plain("set", "/mnt/kv", "promote_after=3", "")


def test_get_offers_names_and_repeats_none() -> None:
    assert set(plain("get", "/mnt/kv", "")) == {row.name for row in rows(Config)}
    assert plain("get", "/mnt/kv", "ram", "ra") == []


def test_options_of_a_bucket_and_other_words() -> None:
    assert plain("gc", "-o", "s3_r") == ["s3_region="]
    assert plain("fsck", "/data", "-o", "s3_sh") == ["s3_shared="]
    assert plain("connect", "ll") == ["llamacpp"]
    assert plain("simulate", "trace", "--policy", "ad") == ["adaptive"]


def test_namespace_commands_offer_settings() -> None:
    names = {f"{row.name}=" for row in rows(Settings)}
    for command in ("create", "set"):
        assert set(plain("ns", command, "/mnt/kv/a", "")) == names
    assert plain("ns", "set", "/mnt/kv/a", "pin=") == ["pin=on", "pin=off"]


def test_without_a_mount_a_namespace_is_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "mounts", lambda *_: [])
    assert offered("ns", "show", "") == [("dir", "")]
    dead = runtime.MountEntry("/", "/nowhere/kv", runtime.FSTYPE, "kvfs", ())
    monkeypatch.setattr(runtime, "mounts", lambda *_: [dead])
    assert offered("ns", "show", "a") == [("dir", "a")]


def test_behind_an_unknown_command_the_commands_are_offered() -> None:
    """A refusal would write into the user's line."""
    assert plain("frobnicate", "umo") == ["umount"]


@pytest.mark.parametrize(
    ("words", "replies"),
    [
        (["mount", "/m", "-o", "ram", "=", "64M,nvme_s"], ["64M,nvme_size="]),
        (["mount", "/m", "-o", "passthrough", "="], ["auto", "on", "off"]),
        (["mount", "/m", "-o", "passthrough", "=", "a"], ["auto"]),
        (["set", "/m", "scrub", "=", "7d", "log_l"], ["log_level="]),
        (["remount", "/m", "-o", "ram", "=", "1G,log_level", "=", "d"], ["debug"]),
        (["statu"], ["status"]),
    ],
)
def test_bash_gets_what_replaces_the_word_at_the_cursor(
    words: list[str], replies: list[str], tmp_path: Path
) -> None:
    """Bash makes a word of each `=` (COMP_WORDBREAKS), and replaces what follows the last one."""
    program = tmp_path / "kvfs"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvfs "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(_KVFS_COMPLETE=bash_source kvfs)"; compopt() { echo "compopt $*" >&2; }; '
        'COMP_WORDS=(kvfs "$@"); COMP_CWORD=$#; _kvfs_completion kvfs; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines() == replies
    assert ("nospace" in done.stderr) == replies[0].endswith("=")
