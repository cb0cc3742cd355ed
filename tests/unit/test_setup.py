"""`kvfs setup`: below another root, so that this machine stays as it is."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvfs.cli import COMMANDS, main, manual
from kvfs.cli import setup as setup_command
from kvfs.config import Config


def setup(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["setup", "--root", str(root), *arguments])


def files(root: Path) -> dict[str, bytes | str]:
    """Contents, and targets of links, by path."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_setup_writes_once_and_removes_all(tmp_path: Path) -> None:
    done = setup(tmp_path)
    assert done.exit_code == 0, done.output
    found = files(tmp_path)
    assert {"sbin/mount.kvfs", "sbin/mount.fuse.kvfs", "etc/systemd/system/kvfs@.service"} <= set(
        found
    )
    unit = (tmp_path / "etc/systemd/system/kvfs@.service").read_text()
    assert " file:/usr/local/share/kvfs/docs/operating.md\n" in unit
    assert b"program=/usr/local/bin/kvfs\n" in (tmp_path / "sbin/mount.kvfs").read_bytes()
    assert os.access(tmp_path / "sbin/mount.kvfs", os.X_OK)
    assert all(f"usr/local/share/man/man1/kvfs-{name}.1" in found for name in COMMANDS)
    assert (tmp_path / "usr/local/share/kvfs/mount/observe/kvfs.rules.yml").is_file()

    again = setup(tmp_path)
    assert (again.exit_code, again.output) == (0, "nothing to change\n")
    assert files(tmp_path) == found

    done = setup(tmp_path, "--remove")
    assert done.exit_code == 0, done.output
    assert files(tmp_path) == {}


def test_mounts_are_named_at_a_removal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_command, "kvfs_mounts", list)
    setup_command._say_mounts()
    monkeypatch.setattr(setup_command, "kvfs_mounts", lambda: ["/mnt/kv", "/mnt/b\n"])
    setup_command._say_mounts()
    assert capsys.readouterr().err == (
        "kvfs setup: still mounted: /mnt/kv, /mnt/b\\n; unmount them with kvfs umount before you "
        "delete this kvfs\n"
    )


def test_setup_leaves_other_files_alone(tmp_path: Path) -> None:
    for name in ("sbin/mount.kvfs", "usr/local/bin/kvfs", "etc/systemd/system/kvfs@.service"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("another's\n")
    done = setup(tmp_path)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("left alone") == 3
    assert setup(tmp_path, "--remove").exit_code == 0
    assert len([text for text in files(tmp_path).values() if text == b"another's\n"]) == 3


def test_setup_takes_over_the_helper_of_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "sbin").mkdir()
    (tmp_path / "checkout").mkdir()
    old = tmp_path / "checkout" / "mount.kvfs"
    old.write_text("old")
    (tmp_path / "sbin/mount.kvfs").symlink_to(old)
    assert setup(tmp_path, "--only", "helper").exit_code == 0
    assert not (tmp_path / "sbin/mount.kvfs").is_symlink()
    assert old.read_text() == "old"


def test_the_package_and_setup_do_not_touch_each_other(tmp_path: Path) -> None:
    assert setup(tmp_path, "--prefix", "/usr").exit_code == 0
    unit = (tmp_path / "usr/lib/systemd/system/kvfs@.service").read_text()
    assert " file:/usr/share/kvfs/docs/operating.md\n" in unit
    assert "/usr/local" not in unit
    (tmp_path / "sbin").symlink_to("usr/sbin")  # as Debian has it
    before = files(tmp_path)
    done = setup(tmp_path, "--only", "helper")
    assert done.stderr.count("belongs to the package kvfs and is left alone") == 2
    assert setup(tmp_path, "--remove").exit_code == 0
    after = files(tmp_path)
    assert {name: after.get(name) for name in before} == before


def test_options_of_a_mount_are_made_once_and_never_removed(tmp_path: Path) -> None:
    assert "systemctl enable --now 'kvfs@mnt-kv.service'" in setup(tmp_path, "/mnt/kv").output
    options = tmp_path / "etc/kvfs/mnt/kv.conf"
    assert options.stat().st_mode & 0o777 == 0o600
    (given,) = re.findall("^OPTIONS='(.*)'$", options.read_text(), re.MULTILINE)
    config = Config.from_options(Path("/mnt/kv"), given)
    assert (config.ram, config.nvme) == (Config.from_options(Path("/mnt/kv"), "").ram, None)
    options.write_text("OPTIONS=ram=1G\n")
    assert "is there and is left alone" in setup(tmp_path, "/mnt/kv").output
    assert setup(tmp_path, "--remove").exit_code == 0
    assert options.read_text() == "OPTIONS=ram=1G\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mnt/kv"], "mount point mnt/kv: expected an absolute path"),
        (["--remove", "/mnt/kv"], "--remove /mnt/kv: options of mounts stay"),
        (["--only", "unit"], "'unit' is not one of"),
        (["--root", "/none"], "--root /none: expected a directory that exists"),
    ],
)
def test_bad_input_changes_nothing(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = setup(tmp_path, *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert files(tmp_path) == {}


def test_manual_pages_have_no_fault_and_say_what_the_help_says(tmp_path: Path) -> None:
    pages = manual.pages(main)
    assert pages.keys() == {"kvfs.1", "mount.kvfs.8", *(f"kvfs-{name}.1" for name in COMMANDS)}
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "mount.kvfs.8").unlink()
    command = ("groff", "-man", "-Tutf8", "-ww", "-b")
    done = subprocess.run(
        [*command, *tmp_path.iterdir()], capture_output=True, text=True, check=True
    )
    faults = [line for line in done.stderr.splitlines() if "cannot adjust line" not in line]
    assert not [line for line in faults if "warning" in line or "error" in line], faults
    read = " ".join(done.stdout.split())
    assert "size of the RAM tier; 0: no RAM tier" in read
    assert "Change settings of NAMESPACE while it is in use" in read
