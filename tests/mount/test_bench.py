"""`kvfs bench` on a real mount: it prints results, drops no object, and leaves no file."""

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.conftest import Mount
from tests.harness import KVFS, wait_for


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_bench_uses_free_room_and_drops_no_object(mount: Mount, tmp_path: Path) -> None:
    kv = mount("ram=256M,nvme={tmp}/nvme,nvme_size=256M")
    (kv.path / "a").write_bytes(b"a" * 5000)
    (tmp_path / "beside").mkdir()
    done = run(kv.path, "--against", tmp_path / "beside", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [row["bytes"] for row in found["sizes"]] == [65536, 1 << 20, 16 << 20]
    for row in found["sizes"]:
        assert row["files"] * row["bytes"] <= 128 << 20
        for side in ("mount", "beside"):
            assert all(value > 0 for value in row[side].values())
            assert row[side]["open_p50_s"] <= row[side]["open_p99_s"]
    engine = found["engine"]
    assert engine["files"] * engine["bytes"] <= 128 << 20
    for side in ("mount", "beside"):
        assert all(value > 0 for value in engine[side].values())
        assert engine[side]["open_and_fstat_p50_s"] <= engine[side]["open_and_fstat_p99_s"]
    assert engine["verdict"].startswith(f"Loads get {engine['speed']:.1f} of the speed of")
    assert found["machine"]["tier"] == "ram"
    assert os.listdir(kv.path) == ["a"]
    assert os.listdir(tmp_path / "beside") == []
    status = kv.idle()
    assert status["counters"]["dropped"] == 0
    wait_for(lambda: not kv.status()["dropped"], "the namespace is cleared")
    shown = run(kv.path, "--against", tmp_path / "beside")
    assert "GB/s" in shown.stdout
    assert "99 % of them within" in shown.stdout
    assert "Loads get" in shown.stdout
    assert "Writes get" in shown.stdout
    assert "more is better" in shown.stdout


def test_bench_refuses_wrong_targets_and_cleans_up_after_an_interrupt(
    mount: Mount, tmp_path: Path
) -> None:
    kv = mount("ram=20M")
    (kv.path / "a").write_bytes(b"a" * 5000)
    for arguments, why in (
        ((kv.path,), "so that kvfs need not drop objects"),
        ((kv.path, "--against", tmp_path / "none"), "expected an existing directory"),
        ((kv.path, "--against", kv.path), "expected a directory outside of the mount"),
        ((tmp_path,), "is not a mount point"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1
    other = mount("ram=512M", "other")
    process = subprocess.Popen([*KVFS, "bench", other.path, "--against", tmp_path])
    try:
        wait_for(lambda: os.listdir(other.path), "it has begun")
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert os.listdir(other.path) == []
    assert not list(tmp_path.glob("kvfs-bench-*"))
    wait_for(lambda: not other.status()["dropped"], "the namespace is cleared")


def test_next_bench_clears_the_files_of_a_killed_one(mount: Mount, tmp_path: Path) -> None:
    kv = mount("ram=256M")
    beside = tmp_path / "beside"
    beside.mkdir()
    process = subprocess.Popen([*KVFS, "bench", kv.path, "--against", beside])
    try:
        wait_for(lambda: os.listdir(kv.path) and os.listdir(beside), "it has begun")
    finally:
        process.kill()
        process.wait()
    assert os.listdir(kv.path) == os.listdir(beside) == [f"kvfs-bench-{process.pid}"]
    ours, file = f"kvfs-bench-{os.getpid()}", f"kvfs-bench-{process.pid}0"
    for side in (kv.path, beside):
        (side / ours).mkdir()  # of a process that lives
        (side / file).write_bytes(b"f")
    done = run(kv.path, "--against", beside)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(os.listdir(kv.path)) == set(os.listdir(beside)) == {ours, file}
