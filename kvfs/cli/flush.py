"""`kvfs flush`: upload what the bucket lacks now, not when its time has come."""

import time
from pathlib import Path
from typing import Any

import click

from kvfs import runtime
from kvfs.cli import human, mountpoint_argument
from kvfs.cli.screen import moving
from kvfs.control import request
from kvfs.errors import KvfsError

POLL_S = 0.2
STALLED_S = 120.0  # a store that is tried again has a pause of a minute between two attempts


@click.command
@mountpoint_argument
@click.option("--wait", is_flag=True, help="Return when the bucket has it all.")
def command(mountpoint: Path, *, wait: bool) -> None:
    """Have the kvfs at MOUNTPOINT upload at once what its bucket lacks."""
    runtime.kvfs_mount(mountpoint)
    found = request(mountpoint, "flush")
    if not wait:
        click.echo(
            f"{found['place']}: {found['objects_left']} objects "
            f"({human(found['bytes_left'])}) are to be uploaded"
        )
        return
    _wait(mountpoint, found)


def _wait(mountpoint: Path, found: dict[str, Any]) -> None:
    """Poll until nothing is left; a bar shows it if it takes long enough to be read."""
    done, moved, total = -1, time.monotonic(), 0  # others may add to what is left
    with moving("uploading") as bar:
        task = bar.add_task("", total=None)
        while found["objects_left"] or not found["loaded"]:
            left = (found["objects_left"], found["bytes_left"])
            if found["down"]:
                raise KvfsError(
                    f"{left[0]} objects are not in {found['place']}, which is down: {found['down']}"
                )
            if found["done"] != done:
                done, moved = found["done"], time.monotonic()
            elif time.monotonic() - moved > STALLED_S:
                raise KvfsError(
                    f"{left[0]} objects are not in {found['place']}, and none got there in "
                    f"{STALLED_S:.0f} s; see the log"
                )
            total = max(total, left[1])
            bar.update(task, total=total, completed=total - left[1])
            time.sleep(POLL_S)
            found = request(mountpoint, "flush")
