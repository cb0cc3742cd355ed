"""Compiles, mounts and starts the comparison floor; always unmounts it."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.bench.mounted import Failed

HERE = Path(__file__).parent
OBJECT = "object"
START_LIMIT_S = 20.0


def compiled(folder: Path) -> Path:
    """Compile the C part; returns the library."""
    target = folder / "passthrough.so"
    try:
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "fuse3"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        source = HERE / "passthrough.c"
        subprocess.run(
            ["gcc", "-O2", "-w", "-shared", "-fPIC", "-o", target, source, *flags], check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise Failed(
            f"the comparison floor needs gcc, pkg-config and libfuse3-dev: {error}"
        ) from None
    return target


@contextlib.contextmanager
def baseline(folder: Path, content: bytes) -> Iterator[Path]:
    """The path of one object, served by the floor from a tmpfs with huge pages."""
    if os.geteuid() != 0:
        raise Failed("the comparison floor needs root: it mounts with mount(2)")
    back, mountpoint = folder / "back", folder / "mount"
    back.mkdir(parents=True)
    mountpoint.mkdir()
    library = compiled(folder)
    options = "size=64M,huge=within_size"
    with contextlib.ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "baseline", back], check=True)
        stack.callback(unmount, back)
        (back / OBJECT).write_bytes(content)
        device = os.open("/dev/fuse", os.O_RDWR)
        try:
            daemon = subprocess.Popen(
                [sys.executable, HERE / "daemon.py", mountpoint],
                env=os.environ
                | {
                    "BASELINE_DEVICE": str(device),
                    "BASELINE_LIBRARY": str(library),
                    "BASELINE_BACK": str(back),
                    "BASELINE_STATE": str(folder / "state"),
                },
                pass_fds=[device],
            )
        finally:
            os.close(device)
        stack.callback(stop, daemon, mountpoint)
        deadline = time.monotonic() + START_LIMIT_S
        while not os.path.ismount(mountpoint):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise Failed("the comparison floor did not start")
            time.sleep(0.01)
        if (mountpoint / OBJECT).read_bytes() != content:
            raise Failed("the comparison floor reads back something else")
        yield mountpoint / OBJECT


def unmount(path: Path) -> None:
    """Unmount, also what is still busy."""
    subprocess.run(["umount", "-l", path], check=True)


def stop(daemon: "subprocess.Popen[bytes]", mountpoint: Path) -> None:
    """Unmounting ends the daemon; if it hangs, killing it ends the mount."""
    subprocess.run(["umount", "-l", mountpoint], check=False, stderr=subprocess.DEVNULL)
    try:
        daemon.wait(5)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
