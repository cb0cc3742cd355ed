"""Runs the drivers of tests/clients in the clients' own environment and reads their verdict."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DRIVERS = ROOT / "tests" / "clients"
INTERPRETER = ROOT / ".venv-clients" / "bin" / "python"
LIMIT_S = 600

Client = Callable[..., dict[str, Any]]


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
            env=os.environ | {"HOME": str(home), "PYTHONPATH": str(ROOT)},
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
