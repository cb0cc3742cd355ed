"""Runs the drivers of tests/clients in the clients' own environment and reads their verdict."""
# ruff: noqa: ANN401  (what fixtures of another file give)

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DRIVERS = ROOT / "tests" / "clients"
INTERPRETER = ROOT / ".venv-clients" / "bin" / "python"
LIMIT_S = 300

Client = Callable[..., dict[str, Any]]
Settled = Callable[[Any], dict[str, Any]]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    """`client(driver, directory, *arguments)`: one client process; its JSON line, checked."""
    if not INTERPRETER.exists():
        pytest.fail(
            f"the clients' environment {INTERPRETER.parents[1]} is missing: "
            "make it with scripts/install-clients.sh",
            pytrace=False,
        )
    home = tmp_path / "home"  # LMCache and SGLang leave traces in $HOME
    home.mkdir()

    def run(driver: str, directory: Path, *arguments: str) -> dict[str, Any]:
        command = [str(INTERPRETER), str(DRIVERS / driver), str(directory), *arguments]
        done = subprocess.run(
            command,
            cwd=home,
            env=os.environ | {"HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        said = f"{' '.join(command)} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        lines = done.stdout.splitlines()
        assert lines, said
        assert lines[-1].startswith("{"), said
        result: dict[str, Any] = json.loads(lines[-1])
        assert result["ok"], said
        assert done.returncode == 0, said
        return result

    return run


@pytest.fixture
def settled() -> Settled:
    """`settled(mounted)`: its status once nothing is being written, moved or copied any more."""

    def wait(mounted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while True:
            status: dict[str, Any] = mounted.status()
            if status["writers"] == status["jobs"] == 0:
                return status
            assert time.monotonic() < deadline, f"still busy after a minute: {status}"
            time.sleep(0.02)

    return wait
