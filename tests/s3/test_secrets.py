"""Credentials for a bucket, and users' bytes, are in none of kvfs's outputs."""

import os
import random
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from kvfs import runtime
from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import KVFS, PATIENCE, Mounted, alive, wait_for
from tests.s3.rig import narrow, send_away

CANARY = "KVFSCANARY"  # begins what nobody may see


def shown(kv: Mounted, scrape: Path) -> dict[str, bytes]:
    """All outputs of kvfs, by place."""
    commands = {
        "status": ("status", str(kv.path)),
        "status --json": ("status", str(kv.path), "--json"),
        "ns list": ("ns", "list", str(kv.path), "--json"),
        "fsck": ("fsck", str(kv.path), "--json"),
        "doctor": ("doctor", "--json"),
        "help": ("mount", "--help"),
    }
    found = {}
    for name, words in commands.items():
        done = subprocess.run([*KVFS, *words], capture_output=True, check=False, timeout=PATIENCE)
        found[name] = done.stdout + done.stderr
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(PATIENCE)
        asking.connect(str(scrape))
        asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        found["metrics"] = b"".join(iter(lambda: asking.recv(1 << 16), b""))
    for path in kv.log.parent.glob(f"{kv.log.name}*"):
        found[path.name] = path.read_bytes()
    for path in runtime.runtime_dir(kv.path).rglob("*"):
        if path.is_file():
            found[path.name] = path.read_bytes()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[str(path)] = path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return found


def test_no_secret_is_shown(
    s3: Server, bucket: str, mount: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are in a profile and in the environment, users' bytes in files; a crash is logged."""
    key, secret = (s3.credentials[f"AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    (tmp_path / "credentials").write_text(
        f"[here]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        f"[other]\naws_access_key_id = {CANARY}1\naws_secret_access_key = {CANARY}2\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for number, name in enumerate(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")):
        monkeypatch.setenv(name, f"{CANARY}ENV{number}")
    scrape = tmp_path / "metrics.sock"
    kv = mount(
        f"ram=64M,nvme={{tmp}}/nvme,nvme_size=512M,log_level=debug,metrics={scrape},s3_delay=0.1,"
        f"s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},s3_region=us-east-1,s3_profile=here"
    )
    data = f"{CANARY}BYTES".encode() * 5000 + random.Random(3).randbytes(200_000)
    directory = narrow(kv, "n")
    send_away(directory, {"a": data, "b": data})
    assert (directory / "a").read_bytes() == data
    os.setxattr(directory / "b", "user.note", f"{CANARY}NOTE".encode())
    kv.kill_daemon(signal.SIGABRT)  # Python's fault handler says where all threads were
    wait_for(lambda: b"Fatal Python error" in kv.log.read_bytes(), "a crash is in the log")
    assert (directory / "b").read_bytes() == data
    wait_for(lambda: scrape.exists() and alive(kv.pid), "the next daemon shows metrics")

    def all_shown() -> dict[str, bytes] | None:
        try:
            return shown(kv, scrape)
        except ConnectionError:  # its process is just starting
            return None

    found = wait_for(all_shown, "all answer")
    assert {"status", "doctor", "metrics", "config", kv.log.name} <= found.keys()
    assert b"kvfs_up" in found["metrics"]
    assert b"s3_profile" in found["status --json"], "its name is no secret"
    for where, text in found.items():
        for word in (secret, CANARY):
            assert word.encode() not in text, where


def test_log_and_sockets_are_private_to_the_mounting_user(mount: Mount) -> None:
    """This holds with any umask at the mount, because the log has names."""
    before = os.umask(0)
    try:
        kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=512M,metrics={tmp}/metrics.sock")
    finally:
        os.umask(before)
    (kv.path / "x").write_bytes(b"x")
    kv.idle()
    roots = [kv.log, kv.log.parent / "nvme", kv.log.parent / "metrics.sock"]
    roots += [runtime.runtime_dir(kv.path), Path(kv.status()["tiers"]["ram"]["path"])]
    for root in roots:
        for path in (root, *root.rglob("*")):
            ways = (path, *(above for above in path.parents if above.is_relative_to(root)))
            private = any(way.lstat().st_mode & 0o077 == 0 for way in ways)
            assert private, (path, oct(path.lstat().st_mode))
