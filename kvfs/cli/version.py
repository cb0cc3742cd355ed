"""`kvfs version`: the version of this program, and where it is."""

import platform
from pathlib import Path

import click

import kvfs
from kvfs.cli import give, json_option


@click.command
@json_option
def command(*, as_json: bool) -> None:
    """Print the version. `kvfs mounts` has the versions of the daemons."""
    found = {
        "version": kvfs.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "package": str(Path(kvfs.__file__).parent),
    }
    give(found, lambda _: click.echo(_text(found)), as_json=as_json)


def _text(found: dict[str, str]) -> str:
    return (
        f"kvfs {found['version']} (Python {found['python']}, Linux {found['kernel']}, "
        f"{found['package']})"
    )
