"""What the directories of tests/data hold: written by `make.sh`, compared by the tests."""

import os
import random
import sys
from pathlib import Path

SIZES = {
    "plain": 1,
    "dir/below/deep": 1234,
    "kv/a": 5000,
    "kv/b": 70_000,
    "kv/pinned": 300,
    f"tree/{'a' * 32}/{'b' * 32}": 4096,
    f"tree/{'b' * 32}/{'c' * 32}": 4096,
}
ISLAND = b"island"
TIME = 1_700_000_000_000_000_007  # ns
NOTE = b"of the version before"


def content(name: str) -> bytes:
    return random.Random(name).randbytes(SIZES[name])


def packed() -> bytes:
    """It is smaller when compressed."""
    return bytes(2 << 20) + random.Random("packed").randbytes(4096)


def fill(root: Path) -> None:
    (root / "dir/below").mkdir(parents=True)
    (root / "dir/below").chmod(0o750)
    (root / f"tree/{'a' * 32}").mkdir()
    for name in SIZES:
        (root / name).write_bytes(content(name))
    (root / "kv/packed").write_bytes(packed())
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(ISLAND)
    (root / "link").symlink_to("kv/a")
    (root / "dir/hard").hardlink_to(root / "plain")
    os.mkfifo(root / "dir/fifo")
    os.setxattr(root / "kv/a", "user.note", NOTE)
    (root / "kv/b").chmod(0o640)
    os.utime(root / "kv/b", ns=(TIME, TIME))


if __name__ == "__main__":
    fill(Path(sys.argv[1]))
