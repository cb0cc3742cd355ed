"""`scripts.bench.engines` runs: real connectors on all sides that need no other program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "scripts.bench.engines", "--quick"]
SIDES = {"kvfs", "tmpfs", "disk"}

pytestmark = [pytest.mark.clients, pytest.mark.slow]


def test_connectors_put_and_get_on_every_side(tmp_path: Path) -> None:
    output = tmp_path / "engines.json"
    chosen = ("loop", "sglang file", "lmcache local_disk", "vllm fs 1M")
    command = [*RUN, *(word for name in chosen for word in ("--only", name))]
    command += ["--nvme", str(tmp_path), "--ram", "512M", "--option", "fast_open=on"]
    done = subprocess.run(
        [*command, "--json", str(output)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    rows = {(row["connector"], row["what"]): row for row in found["results"]}
    for name in chosen[1:]:
        assert {what for connector, what in rows if connector == name} == {"put", "get"}
    calls = ("write", "first open", "first fstat", "open", "fstat", "read", "close")
    wanted = {f"{call}, {share}" for call in calls for share in ("p50", "p99")}
    looped = {what for connector, what in rows if connector == "loop"}
    assert looped == wanted | {"open after a copy, p50", "open after a copy, p99"}
    for row in rows.values():
        assert set(row["value"]) == set(row["ratio"]) == SIDES
        assert all(value > 0 for value in row["value"].values())
        assert {len(rounds) for rounds in row["rounds"].values()} == {1}
    assert found["status"]["options"]["fast_open"]
    assert [path.name for path in tmp_path.iterdir()] == ["engines.json"]


def test_an_unknown_connector_is_refused() -> None:
    done = subprocess.run(
        [*RUN, "--only", "nobody"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "expected one of loop, sglang file" in done.stderr
