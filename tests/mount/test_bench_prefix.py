"""The benchmarks of prefixes run: every way saves blocks, and loads them again."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.prefix import RACE
from scripts.bench.sides import PEER

ROOT = Path(__file__).parents[2]


def run(benchmark: str, folder: Path) -> dict[str, Any]:
    output = folder / "found.json"
    command = [sys.executable, "-m", f"scripts.bench.{benchmark}"]
    command += ["--quick", "--json", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.slow
def test_prefixes(tmp_path: Path) -> None:
    found = run("prefix", tmp_path)
    rates = {
        (row["way"], row["place"], row["phase"]): row["rates"]
        for row in found["results"]
        if row["phase"] != "map"
    }
    wanted = {
        (*one, phase) for one in RACE if one[1] != PEER for phase in ("save", "first load", "load")
    }
    assert set(rates) == wanted | {("kvfs", place, "map and copy") for place in ("mount", "tmpfs")}
    assert all(rate > 0 for each in rates.values() for rate in each)
    assert found["match"]["blocks"] == 40
    assert found["match"]["stats"] > 0
    assert {bar["bar"] for bar in found["bars"]} == {
        *("load / memcpy", "save / raw write", "map, us a block"),
        *("match in one call, ms", "match by bisection, stats"),
    }


@pytest.mark.slow
def test_lossy_storage(tmp_path: Path) -> None:
    found = run("storage", tmp_path)
    assert [(row["model"], row["storage"]) for row in found["errors"]] == [
        (model, name)
        for model in ("llama", "qwen2")
        for name in ("raw", "fp8", "int4:32", "int4:64", "int4:128")
    ]
    for row in found["errors"]:
        assert (row["kl_mean"] == 0) == (row["storage"] == "raw")
        assert row["kv"] < 0.3
