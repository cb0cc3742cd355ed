"""Mounts that show objects of a bucket as files: s3fs and rclone, as Debian has them, and kvfs.

Contract: each mounts the objects of a bucket at a folder that exists, and is unmounted when its
context ends. It needs `apt-get install s3fs rclone`, as root. Not for timing.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from kvfs.s3.place import BucketPlace
from scripts.bench.mounted import Failed, is_mounted

PATIENCE_S = 30.0


@contextlib.contextmanager
def s3fs(place: BucketPlace, folder: Path, memory: Path) -> Iterator[Path]:
    """`memory`: where it keeps what it has read, which it always does."""
    environment = {
        "AWSACCESSKEYID": os.environ["AWS_ACCESS_KEY_ID"],
        "AWSSECRETACCESSKEY": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    options = f"url={place.endpoint},use_path_request_style,parallel_count=8"
    options += f",tmpdir={memory},stat_cache_expire=1"
    command = ["s3fs", place.bucket, str(folder), "-f", "-o", options]
    with _mounted(command, environment, folder):
        yield folder


@contextlib.contextmanager
def rclone(place: BucketPlace, folder: Path) -> Iterator[Path]:
    """Reads go to the bucket: with a cache of whole files it would write each to a disk first."""
    environment = {
        "RCLONE_CONFIG": "/dev/null",
        "RCLONE_S3_PROVIDER": "Ceph",
        "RCLONE_S3_ENV_AUTH": "true",
        "RCLONE_S3_ENDPOINT": place.endpoint or "",
        "RCLONE_S3_FORCE_PATH_STYLE": "true",
    }
    command = ["rclone", "mount", f":s3:{place.bucket}", str(folder), "--read-only"]
    command += ["--dir-cache-time", "1s", "--poll-interval", "0", "--vfs-cache-mode", "off"]
    with _mounted(command, environment, folder):
        yield folder


def missing() -> list[str]:
    """Which of the two are not installed."""
    return [name for name in ("s3fs", "rclone") if shutil.which(name) is None]


@contextlib.contextmanager
def _mounted(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    """Raises Failed if it is not mounted in time.

    The server speaks plain HTTP, and rclone cannot be given a bundle of certificates besides.
    """
    folder.mkdir()
    inherited = {name: text for name, text in os.environ.items() if name != "AWS_CA_BUNDLE"}
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        process = subprocess.Popen(
            command, env={**inherited, **environment}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not is_mounted(folder):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise Failed(f"{command[0]} has not mounted {folder}: {log.read()[-500:]}")
                time.sleep(0.05)
            yield
        finally:
            if is_mounted(folder):
                subprocess.run(["umount", "-l", str(folder)], check=True)
            process.terminate()
            process.wait(PATIENCE_S)
