"""Runs the drivers of tests/clients in the clients' own environment and reads their verdict."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DRIVERS = ROOT / "tests" / "clients"
INTERPRETER = ROOT / ".venv-clients" / "bin" / "python"
LIMIT_S = 600

Client = Callable[..., dict[str, Any]]


class Forks:
    """For each engine a process that has imported it; each run is a fork of that process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._starting = threading.Lock()

    def run(self, driver: str, arguments: list[str], home: Path) -> tuple[int, str, str]:
        """Run one process; return its exit status and its output."""
        engine = driver.removesuffix(".py").split("_")[1]
        self._start(engine, driver)
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as asking:
            printed = [Path(folder, name) for name in ("stdout", "stderr")]
            wanted = {
                "command": [str(DRIVERS / driver), *arguments],
                "directory": str(home),
                "environment": dict(os.environ) | {"HOME": str(home), "PYTHONPATH": str(ROOT)},
                "printed": [str(path) for path in printed],
            }
            asking.settimeout(LIMIT_S)
            asking.connect(str(self._folder / engine))
            asking.sendall(f"{json.dumps(wanted)}\n".encode())
            with asking.makefile() as answer:
                status = answer.readline()
            assert status, f"the process that has imported {engine} is gone"
            out, err = (path.read_text(errors="replace") for path in printed)
        return int(status), out, err

    def _start(self, engine: str, driver: str) -> None:
        with self._starting, socket.socket(socket.AF_UNIX) as door:
            if engine in self._servers:
                return
            door.bind(str(self._folder / engine))
            door.listen()
            number = door.fileno()
            self._servers[engine] = subprocess.Popen(
                [INTERPRETER, DRIVERS / "fork.py", DRIVERS / driver, str(number)],
                cwd=self._folder,
                # Engines leave traces in $HOME.
                env=os.environ | {"HOME": str(self._folder), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,  # with whose end it ends, if this process is killed
                pass_fds=[number],
                start_new_session=True,
            )

    def end(self) -> None:
        for server in self._servers.values():
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    if not INTERPRETER.exists():
        pytest.fail(
            f"the clients' environment {INTERPRETER.parents[1]} is missing: "
            "make it with scripts/install-clients.sh",
            pytrace=False,
        )
    with tempfile.TemporaryDirectory() as folder:  # whose name is short enough for a socket
        found = Forks(Path(folder))
        yield found
        found.end()


@pytest.fixture
def client(forks: Forks, tmp_path: Path) -> Client:
    """`client(driver, directory, *arguments)` runs one client process; returns its JSON line."""
    home = tmp_path / "home"
    home.mkdir()

    def run(driver: str, directory: Path, *arguments: str) -> dict[str, Any]:
        status, out, err = forks.run(driver, [str(directory), *arguments], home)
        said = f"{driver} {directory} {' '.join(arguments)} exited {status}\n{out}\n{err}"
        lines = out.splitlines()
        assert lines, said
        assert lines[-1].startswith("{"), said
        result: dict[str, Any] = json.loads(lines[-1])
        assert result["ok"], said
        assert status == 0, said
        return result

    return run
