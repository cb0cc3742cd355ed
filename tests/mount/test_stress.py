"""Many processes on few files: opens, closes, rewrites, renames and unlinks that overlap."""

import hashlib
import os
import random
import subprocess
import sys

import pytest

from tests.harness import Mounted

SEED = 41
OPERATIONS = 500  # of each
WORKERS = 8

CLIENT = """
import hashlib, os, random, sys
folder, seed, operations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
for count in range(operations):
    path = f"{folder}/{rng.randrange(6)}.bin"
    action = rng.random()
    try:
        if action < 0.55:
            fd = os.open(path, os.O_RDONLY)
            data = os.read(fd, 1 << 20)
            size = os.fstat(fd).st_size
            os.close(fd)
            if data and len(data) >= 32:
                assert hashlib.sha256(data[32:]).digest() == data[:32], "wrong bytes"
        elif action < 0.85:
            body = rng.randbytes(rng.randrange(1, 200_000))
            temporary = f"{folder}/.{seed}.{count}.tmp"
            with open(temporary, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.rename(temporary, path)
        elif action < 0.9:
            os.unlink(path)
        elif action < 0.95:
            fd = os.open(path, os.O_RDWR)
            os.close(fd)
        else:
            os.stat(path)
    except FileNotFoundError:
        pass
"""


@pytest.mark.slow
def test_overlapping_processes_see_whole_files_and_no_error(either: Mounted) -> None:
    """A file that others unlink may give ENOENT only; never EIO, never mixed content."""
    print("seed", SEED)
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(either.path), str(SEED + number), str(OPERATIONS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(WORKERS)
    ]
    said = [client.communicate() for client in clients]
    assert [client.returncode for client in clients] == [0] * WORKERS, said
    rng = random.Random(SEED)
    body = rng.randbytes(1000)
    (either.path / "after").write_bytes(body)
    assert hashlib.sha256((either.path / "after").read_bytes()).digest() == (
        hashlib.sha256(body).digest()
    )
    assert not [name for name in os.listdir(either.path) if name.endswith(".tmp")]
