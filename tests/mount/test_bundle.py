"""`kvfs doctor --bundle` of a real mount: it has all that a report needs, and no secret."""

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/planted",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTED0001",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXplanted==",
    "AWS_ENDPOINT_URL": "https://somebody:plantedpw@s3.example.org",
    "MY_DATABASE": "plantedunknown",
}
NAMES = ("tenant-blue", "meta-SEP-llama@1@0@5eed@bfloat16.data", "plainname", "weird name.kv")


def doctor(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, "doctor", *map(str, arguments)]
    environment = os.environ | SECRETS
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive.getmembers():
            file = archive.extractfile(entry)
            assert file is not None
            found[entry.name.removeprefix("kvfs-bundle/")] = file.read().decode()
    return found


def used(kv: Mounted) -> Mounted:
    """A mount with names in its catalog, its log, its status and its events."""
    space = kv.path / NAMES[0]
    space.mkdir()
    os.setxattr(space, "user.kvfs.eviction", b"lru")
    for name in NAMES[1:]:
        (space / name).write_bytes(b"n" * 5000)
        (space / name).read_bytes()
    kv.expect_log("attribute .* is refused")
    with pytest.raises(OSError, match="Invalid argument"):
        os.setxattr(space, f"user.kvfs.{NAMES[3]}", b"see s3://u:plantedpw@host/x")
    kv.idle()
    return kv


def test_bundle_has_configuration_status_and_logs(mount: Mount, tmp_path: Path) -> None:
    kv = used(mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M"))
    done = doctor("--bundle", tmp_path / "b.tar.gz")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600
    found = members(tmp_path / "b.tar.gz")
    (at,) = [
        name.removesuffix("config.json")
        for name, text in found.items()
        if name.endswith("config.json") and str(kv.path) in found[name.replace("config", "status")]
    ]
    status = json.loads(found[f"{at}status.json"])
    assert status["daemon_pid"] == kv.pid
    assert status["hot"][0]["path"] == "<masked>"
    assert json.loads(found[f"{at}config.json"])["nvme"] == str(tmp_path / "nvme")
    spaces = json.loads(found[f"{at}namespaces.json"])
    assert [(one["name"], one["settings"]["eviction"]) for one in spaces] == [
        (".", "adaptive"),
        ("<masked>", "lru"),
    ]
    events = json.loads(found[f"{at}events.json"])
    assert events[0]["kind"] == "started"
    assert any("mounted, passthrough" in event.get("text", "") for event in events)
    masked = "WARNING kvfs.fuse.operations: <masked>: attribute <masked> <masked> is refused"
    assert masked in found[f"{at}log.txt"]  # the attribute's name has a space
    assert json.loads(found[f"{at}fsck.json"])["findings"] == {}
    assert "VmRSS" in found[f"{at}daemon/status"]
    assert "MemTotal" in found["machine/proc/meminfo"]
    environment = json.loads(found["environment.json"])
    assert {environment[name] for name in list(SECRETS)[:4]} == {"is set"}
    assert "MY_DATABASE" not in environment
    assert {check["name"] for check in json.loads(found["doctor.json"])} >= {"kernel", "/dev/fuse"}
    everything = "\n".join(found.values())
    for secret in (*SECRETS.values(), "planted"):
        assert secret not in everything
    for name in (*NAMES, "5eed", "llama", "weird"):
        assert name not in everything, name


def test_names_are_in_it_if_they_are_to_be(mount: Mount, tmp_path: Path) -> None:
    kv = used(mount("ram=64M"))
    assert doctor("--bundle", tmp_path / "b.tar.gz", "--names", "--no-fsck").returncode == 0
    found = members(tmp_path / "b.tar.gz")
    everything = "\n".join(found.values())
    assert NAMES[0] in everything
    assert "planted" not in everything
    assert not any(name.endswith("fsck.json") for name in found)
    for arguments, why in (
        (("--bundle", tmp_path / "b.tar.gz"), "File exists"),
        (("--bundle", tmp_path / "none" / "b"), "No such file"),
        (("--names",), "need --bundle FILE"),
        (("--bundle", ""), "the path is empty"),
    ):
        done = doctor(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = doctor("--bundle", tmp_path / "c\x1b[2J", "--no-fsck")
    assert (done.returncode, "c\\x1b[2J: " in done.stdout) == (0, True)
    kinds = [event["kind"] for event in request(kv.path, "events")["events"]]
    assert kinds[0] != "takeover"
    kv.kill_daemon()
    events = request(kv.path, "events")["events"]
    (took,) = [event for event in events if event["kind"] == "takeover"]
    assert (took["number"], took["pid"]) == (1, kv.pid)
