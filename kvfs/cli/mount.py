"""`kvfs mount`: check everything, start the daemon, return when the mount answers.

The daemon gets the finished configuration on its stdin, as JSON, and says on its stdout, in one
line, that it is ready or why not. Not for keeping it alive afterwards.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import click

from kvfs import runtime
from kvfs.cli import human, mountpoint_argument
from kvfs.config import Config, describe_options
from kvfs.control import request
from kvfs.errors import ConfigError, KvfsError

USAGE_ERROR = 2


def _options_help() -> str:
    rows = [
        f"  {row.name:<15}{row.meaning}\n"
        f"  {'':<15}[{row.unit}; default: {row.default}{'; kvfs set' if row.hot else ''}]"
        for row in describe_options()
    ]
    note = "  Sizes are 512M, 2G, 1.5T; those marked 'kvfs set' can change while mounted."
    return "\b\nMount options:\n" + "\n".join([*rows, note])


@click.command(epilog=_options_help())
@mountpoint_argument
@click.option(
    "-o", "options", multiple=True, metavar="OPTION[=VALUE],...", help="Mount options, as below."
)
@click.option("-f", "--foreground", is_flag=True, help="Stay until unmounted.")
def command(mountpoint: Path, options: tuple[str, ...], *, foreground: bool) -> None:
    """Mount kvfs on the directory MOUNTPOINT."""
    config = Config.from_options(mountpoint, ",".join(options))
    config.check()
    if foreground:
        from kvfs import daemon  # noqa: PLC0415 - a mount in the background never loads it here

        daemon.run(config, lambda: click.echo(f"{mountpoint}: mounted"))
    else:
        _start(config)
        click.echo(_what_is_on(mountpoint))


def _start(config: Config) -> None:
    """Start the daemon and return when it serves the mount; raise what it says otherwise."""
    with tempfile.TemporaryFile() as stderr:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "kvfs.daemon"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd="/",  # keeps no directory busy, and Python imports nothing from the caller's
            start_new_session=True,
            text=True,
        )
        try:
            try:
                line = _converse(daemon, config)
            except BaseException:
                daemon.terminate()
                raise
            answer = json.loads(line) if line else {"error": _death(daemon, stderr)}
        finally:
            if daemon.stdout:
                daemon.stdout.close()
    if "error" in answer:
        daemon.wait()
        raise (ConfigError if answer.get("exit") == USAGE_ERROR else KvfsError)(answer["error"])
    daemon.returncode = 0  # it is to outlive this process, which Popen would warn of


def _converse(daemon: "subprocess.Popen[str]", config: Config) -> str:
    if daemon.stdin is None or daemon.stdout is None:
        raise RuntimeError("the daemon was started without pipes")
    try:
        with daemon.stdin:
            daemon.stdin.write(config.to_json())
    except BrokenPipeError:
        return ""  # it died first; why is on its stderr
    return daemon.stdout.readline()


def _death(daemon: "subprocess.Popen[str]", stderr: IO[bytes]) -> str:
    code = daemon.wait()
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    return f"the daemon {how} before it was ready: {lines[-1] if lines else 'it said nothing'}"


def _what_is_on(mountpoint: Path) -> str:
    status = request(mountpoint, "status")
    parts = [
        f"{name.replace('_', ' ')} {'on' if state['on'] else 'off (' + state['why'] + ')'}"
        for name in ("passthrough", "huge_pages")
        for state in [status[name]]
    ]
    parts += [
        f"{name} {human(tier['capacity_bytes'])} at {tier['path']}"
        for name, tier in status["tiers"].items()
    ]
    return (
        f"{click.format_filename(mountpoint)}: {', '.join(parts)}; log {log_of(status, mountpoint)}"
    )


def log_of(status: dict[str, dict[str, str]], mountpoint: Path) -> str:
    """Return where this mount logs."""
    return status["options"].get("log") or str(runtime.log_path(mountpoint))
