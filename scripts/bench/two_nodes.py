"""The cost of a shared prefix: creates, look-ups, listings and an import, on a real S3 server.

    python scripts/bench/two_nodes.py DIRECTORY [OBJECTS]

DIRECTORY is made, and removed at the end.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import xxhash

sys.path.insert(0, str(Path(__file__).parents[2]))
from kvfs import runtime
from kvfs.s3.facts import Facts
from scripts.s3_server import Server
from tests.harness import KVFS, Mounted, wait_for

FILES = 200
SIZE = 64 << 10  # bytes
BUCKET = "bench"


def timed(do: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


class Bench:
    """Mounts below a directory, on one bucket."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made: list[Path] = []
        self.server = Server(directory / "server")
        self.server.start()
        os.environ.update(self.server.credentials)
        self.client = boto3.client("s3", endpoint_url=self.server.endpoint)
        self.client.create_bucket(Bucket=BUCKET)

    def mounted(self, name: str, prefix: str, options: str = "") -> Mounted:
        """A mount that uploads nothing meanwhile, and whose workers have begun."""
        path = self.directory / name
        path.mkdir()
        self.made.append(path)
        made = Mounted(
            path,
            f"ram=512M,s3=s3://{BUCKET}/{prefix},s3_endpoint={self.server.endpoint},"
            f"s3_region=us-east-1,s3_delay=1000{options}",
            self.directory / f"{name}.log",
        )
        made.mount()
        wait_for(lambda: self.bucket(made)["loaded"], "it is ready")
        return made

    def end(self) -> None:
        """Leave nothing behind."""
        for path in self.made:
            if runtime.mount_at(path) is not None:
                subprocess.run([*KVFS, "umount", "--now", str(path)], check=False)
        self.server.wipe()
        shutil.rmtree(self.directory, ignore_errors=True)

    @staticmethod
    def bucket(kv: Mounted) -> dict[str, Any]:
        """Return the bucket's part of the mount's status."""
        found: dict[str, Any] = kv.status()["tiers"]["s3"]
        return found

    def creates(self, name: str, shared: str) -> None:
        """With and without looking names up."""
        kv = self.mounted(name, name, f",s3_shared={shared}")
        (kv.path / "first").write_bytes(b"x")
        data = os.urandom(SIZE)
        times = [
            timed(lambda number=number: (kv.path / f"f{number}").write_bytes(data))  # type: ignore[misc]
            for number in range(FILES)
        ]
        print(f"create, s3_shared={shared}: {sum(times) / FILES * 1000:.1f} ms each")
        if shared == "on":
            absent = [kv.path / f"absent{number}" for number in range(FILES)]
            times = sorted(timed(path.exists) for path in absent)
            half, most = times[FILES // 2], times[FILES * 95 // 100]
            print(f"absent names: median {half * 1000:.1f} ms, 95 % in {most * 1000:.1f} ms")
        kv.umount("--now")

    def fill(self, count: int) -> None:
        """Put so many small objects, as another node would have."""
        body = os.urandom(100)
        digest = xxhash.xxh3_128(body).digest()
        facts = Facts(
            size=len(body),
            digest=digest,
            mtime_ns=10**18,
            mode=0o644,
            uid=0,
            gid=0,
            stored_size=len(body),
            stored_digest=digest,
        ).metadata()

        def put(number: int) -> None:
            self.client.put_object(Bucket=BUCKET, Key=f"p/@0/d/{number}", Body=body, Metadata=facts)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(put, range(count)))

    def listings(self, count: int) -> None:
        """The first one, all of it, and the next one."""
        kv = self.mounted("listing", "p")
        wait_for((kv.path / "d").exists, "the directory is found")
        began = time.perf_counter()
        first = len(os.listdir(kv.path / "d"))
        print(f"first readdir: {first} names in {time.perf_counter() - began:.2f} s")
        wait_for(lambda: self.bucket(kv)["imported"] >= count, "all are named")
        print(f"all named after {time.perf_counter() - began:.2f} s")
        print(f"next readdir: {timed(lambda: os.listdir(kv.path / 'd')):.2f} s")
        print(f"stat of one that was listed: {timed((kv.path / 'd' / '1').stat) * 1000:.1f} ms")
        kv.umount("--now")

    def imports(self) -> None:
        """Of all, and once more."""
        kv = self.mounted("import", "p")
        for what in ("import", "import again"):
            command = [*KVFS, "import", str(kv.path)]
            print(f"{what}: {timed(lambda: subprocess.run(command, check=True)):.1f} s")  # noqa: B023
        kv.umount("--now")


def main() -> None:
    """Print the figures of docs/s3.md."""
    directory = Path(sys.argv[1])
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000  # noqa: PLR2004 (the second one)
    directory.mkdir()
    bench = Bench(directory)
    try:
        for number, shared in enumerate(("on", "off", "on", "off")):
            bench.creates(f"create{number}", shared)
        bench.fill(count)
        bench.listings(count)
        bench.imports()
    finally:
        bench.end()


if __name__ == "__main__":
    main()
