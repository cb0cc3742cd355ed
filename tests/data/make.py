"""Make the archives of this folder with the kvfs that PYTHONPATH names: see README.md.

Contract: this process imports nothing of kvfs, so that it can run any version. Tests compare a
mount with the archives by `state` and `settings`. The script needs root, and Ceph for the bucket.
"""

import hashlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]

DATA = Path(__file__).parent
SERVER = DATA.parents[1] / "scripts/s3-server.sh"
BUCKET, PREFIX = "kvfs-version-before", "p"
PORT = 19000  # of the S3 server, and 40 above it
MACHINE = ("catalog.ballast", "LOG", "LOG.old.*", "lock", "LOCK")  # each kvfs makes its own
BOOT = "/proc/sys/kernel/random/boot_id"
BLOCK = 4096
ROOT = "aa" * 16  # any key may be the first parent but zero
KEYS = [f"{number:02x}" * 16 for number in (17, 34, 51)]
SPACES = {
    "plain": [],
    "set": ["eviction=lru", "quota_soft=64M", "ttl=3650d", "weight=250", "write_iops=5000"],
    "owned": ["uid=1234", "gid=4321", "mode=640", "fingerprint=llama-8b bf16", "version=7"],
    "prefixes": ["prefix=on", "eviction=sieve"],
    "packed": ["compression=nvme"],
    "closing": ["publish=close", "pin=on"],
}


# Prints the slots of a session file. It changes the file.
SLOTS = """
import json, os, socket, sys
from kvfs.fuse.passthrough import Passthrough, _passthrough
device, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
_passthrough.attach(device.fileno(), True, os.open(sys.argv[1], os.O_RDWR), True)
print(json.dumps([slot._asdict() for slot in Passthrough.slots()]))
"""


def kvfs(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "kvfs", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd="/")
    return done.stdout


def _python(code: str, *arguments: str | Path) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd="/")
    return done.stdout


def state(mountpoint: Path) -> dict[str, dict[str, Any]]:
    """Return all that a mount shows of its files, by path."""
    found = {}
    for path in sorted(mountpoint.rglob("*")):
        name = str(path.relative_to(mountpoint))
        if name.split("/", 1)[0] != ".kvfs":
            at = path.lstat()
            shown: dict[str, Any] = {
                field: getattr(at, f"st_{field}")
                for field in ("ino", "mode", "uid", "gid", "nlink", "size", "mtime_ns", "ctime_ns")
            }
            shown["xattrs"] = {
                one: os.getxattr(path, one, follow_symlinks=False).hex()
                for one in os.listxattr(path, follow_symlinks=False)
            }
            if stat.S_ISLNK(at.st_mode):
                shown["target"] = str(path.readlink())
            found[name] = shown
    for name, shown in found.items():
        if stat.S_ISREG(shown["mode"]):
            shown["sha256"] = hashlib.sha256((mountpoint / name).read_bytes()).hexdigest()
    return found


def settings(mountpoint: Path) -> dict[str, dict[str, str]]:
    """Return the settings of each namespace; the mount's own has the name ""."""
    tops = [path for path in mountpoint.iterdir() if path.is_dir() and path.name != ".kvfs"]
    return {
        path.name if path != mountpoint else "": json.loads(kvfs("ns", "show", "--json", path))[
            "settings"
        ]
        for path in (mountpoint, *sorted(tops))
    }


def _wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


def _status(mountpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kvfs("status", "--json", mountpoint))
    return found


def _idle(mountpoint: Path) -> None:
    def still() -> bool:
        found = _status(mountpoint)
        return found["census_done"] and not (found["writers"] or found["jobs"] or found["trash"])

    _wait(still, "the mount is idle")


def _inhabit(mountpoint: Path) -> None:
    """Make names of every kind."""
    dice = random.Random(16)
    for name, chosen in SPACES.items():
        if chosen:
            kvfs("ns", "create", mountpoint / name, *chosen)
        else:
            (mountpoint / name).mkdir()
    plain = mountpoint / "plain"
    (plain / "deep/er").mkdir(parents=True, mode=0o750)
    for number in range(12):
        path = plain / ("deep/er" if number % 2 else "") / f"model@1@0@{number:x}@half.data"
        path.write_bytes(dice.randbytes(dice.randrange(9000)))
        path.chmod((0o644, 0o600, 0o4755)[number % 3])
        os.chown(path, 1000 + number, 2000)
        os.utime(path, ns=(number, 10**18 + number))
    (plain / "empty").touch()
    (mountpoint / "beside").write_bytes(dice.randbytes(5000))
    named = plain / "attributes"
    named.write_bytes(b"named")
    os.setxattr(named, "user.number", b"\0\xff")
    os.setxattr(named, "user.empty", b"")
    os.setxattr(plain / "deep", "user.of a directory", b"d")
    os.link(named, plain / "deep/another name")
    os.symlink("deep/er/../nowhere", plain / "symbolic")
    os.mkfifo(plain / "fifo", 0o620)
    os.mkdir(os.fsencode(plain) + b"/not text \xff\n")
    with (plain / "sparse").open("wb") as file:
        file.seek(8 << 20)
        file.write(b"behind a hole")
    for name in ("set", "owned", "closing"):
        for number in range(3):
            (mountpoint / name / f"{number}").write_bytes(dice.randbytes(3000))
    space = mountpoint / "prefixes"
    (space / ROOT).mkdir()
    for above, key in zip([ROOT, *KEYS], KEYS, strict=False):
        part = space / above / f"{key}.part.tmp"
        part.write_bytes(bytes.fromhex(key) * (BLOCK // 16))
        part.rename(part.with_name(key))
    (mountpoint / "packed/first").write_bytes(b"begins on NVMe")
    for number in range(3):
        (mountpoint / f"packed/{number}").write_bytes(bytes([number, 63]) * (600 << 10))
    kvfs("pin", plain / "attributes", plain / "empty")


@contextmanager
def _mounted(folder: Path, options: str) -> Iterator[Path]:
    mountpoint = folder / "kv"
    mountpoint.mkdir(exist_ok=True)
    kvfs("mount", mountpoint, "-o", f"log={folder}/log,{options}")
    try:
        yield mountpoint
    finally:
        if os.path.ismount(mountpoint):
            kvfs("umount", mountpoint)


def _shown(mountpoint: Path) -> dict[str, Any]:
    return {"files": state(mountpoint), "settings": settings(mountpoint)}


def _closed_and_killed(folder: Path) -> None:
    """Make `closed`, whose sessions all ended, and `killed`, which is one session older."""
    ram, options = "ram=64M", f"nvme={folder}/nvme,nvme_size=1G"
    with _mounted(folder, f"{ram},{options}") as mountpoint:
        _inhabit(mountpoint)
        _idle(mountpoint)
    with _mounted(folder, f"{ram},{options}") as mountpoint:
        _idle(mountpoint)
        _keep_shown(folder, "closed", mountpoint)
        files = _status(mountpoint)["tiers"]["nvme"]
    print("closed:", files)
    _copy(folder / "nvme", folder / "closed")
    with _mounted(folder, f"{ram},{options}") as mountpoint:
        _idle(mountpoint)
        (mountpoint / "plain/empty").unlink()
        (mountpoint / "beside").rename(mountpoint / "plain/moved")
        for number in range(3):
            (mountpoint / f"plain/late{number}").write_bytes(b"late" * 500)
        kvfs("evict", mountpoint / "plain", "--to", "nvme")
        (mountpoint / "new").mkdir()
        for name in ("first, on NVMe", "in memory"):
            (mountpoint / "new" / name).write_bytes(b"no digest")
        kvfs("ns", "set", mountpoint / "set", "weight=300")
        _idle(mountpoint)
        torn = os.open(mountpoint / "new/torn", os.O_CREAT | os.O_WRONLY)
        os.write(torn, b"half")
        _keep_shown(folder, "killed", mountpoint)
        reader = os.open(mountpoint / "plain/moved", os.O_RDONLY)
        found = _status(mountpoint)
        for pid in (found["keeper_pid"], found["daemon_pid"]):
            os.kill(pid, signal.SIGKILL)
        os.close(reader)
        with suppress(ConnectionAbortedError):  # nobody answers
            os.close(torn)
        memory = Path(found["tiers"]["ram"]["path"])
        subprocess.run(["umount", "-l", mountpoint, memory], check=True)
        memory.rmdir()
    (folder / "nvme").rename(folder / "killed")
    where = "from kvfs import runtime; print(runtime.runtime_dir(sys.argv[1]))"
    _copy(Path(_python(f"import sys; {where}", mountpoint).strip()) / "session", folder)
    _copy(folder / "session", folder / "read")
    (folder / "session.json").write_text(_python(SLOTS, folder / "read"))


def _copy(source: Path, target: Path) -> None:
    """Copy with times and holes."""
    subprocess.run(["cp", "-a", "--sparse=auto", source, target], check=True)


def _keep_shown(folder: Path, name: str, mountpoint: Path) -> None:
    (folder / f"{name}.json").write_text(json.dumps(_shown(mountpoint), indent=1, sort_keys=True))


def _bucket(folder: Path) -> None:
    """Make `bucket`, and `spilled`, an NVMe directory whose objects are all in that bucket."""
    said = subprocess.run(
        [SERVER, "start", folder / "s3", str(PORT)], check=True, stdout=subprocess.PIPE, text=True
    )
    os.environ |= dict(one.split("=", 1) for one in said.stdout.split()[1:])
    endpoint = os.environ.pop("S3_ENDPOINT_URL")
    client = boto3.session.Session().client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=BUCKET)
    options = (
        f"ram=64M,nvme={folder}/nvme,nvme_size=1G,s3=s3://{BUCKET}/{PREFIX},s3_delay=0.1,"
        f"s3_endpoint={endpoint},s3_region=us-east-1"
    )
    with _mounted(folder, options) as mountpoint:
        dice = random.Random(17)
        kvfs("ns", "create", mountpoint / "a@b", "compression=s3", "version=3")
        (mountpoint / "plain/deep").mkdir(parents=True)
        for number in range(4):
            path = mountpoint / f"plain/deep/{number} x.kv"
            path.write_bytes(dice.randbytes(2000))
            path.chmod(0o640)
            os.chown(path, 1000, 2000)
        long = mountpoint.joinpath("plain", *("ö" * 100 for _ in range(3)))
        long.mkdir(parents=True)
        (long / "beyond 896 bytes").write_bytes(dice.randbytes(100))
        (mountpoint / "beside").write_bytes(dice.randbytes(70000))
        (mountpoint / "plain/chunks").write_bytes(b"chunk" * (2 << 20))
        for number in range(2):
            (mountpoint / f"a@b/{number}").write_bytes(bytes([number, 63]) * (1 << 17))
        kvfs("flush", mountpoint, "--wait")
        _idle(mountpoint)
        kvfs("evict", mountpoint, "--to", "s3")
        _idle(mountpoint)
        _keep_shown(folder, "spilled", mountpoint)
        kvfs("evict", mountpoint, "--to", "s3")
        _idle(mountpoint)
        print("spilled:", _status(mountpoint)["tiers"])
    (folder / "nvme").rename(folder / "spilled")
    index = {}
    (folder / "bucket").mkdir()
    for number, one in enumerate(client.list_objects_v2(Bucket=BUCKET)["Contents"]):
        got = client.get_object(Bucket=BUCKET, Key=one["Key"])
        (folder / f"bucket/{number}").write_bytes(got["Body"].read())
        index[one["Key"]] = got["Metadata"]
    (folder / "bucket/index.json").write_text(json.dumps(index, indent=1))
    subprocess.run([SERVER, "wipe", folder / "s3"], check=True)


def _pack(folder: Path, archive: str, *names: str) -> None:
    """Pack with times in nanoseconds and holes, and without files that name this machine."""
    excluded = [f"--exclude={one}" for one in MACHINE]
    shape = ["--format=posix", "--pax-option=delete=atime,delete=ctime", "--sparse", "--sort=name"]
    shape += ["--owner=0", "--group=0", "--use-compress-program=gzip -9n"]
    made = DATA / archive
    subprocess.run(["tar", "-cf", made, "-C", folder, *shape, *excluded, *names], check=True)
    print(made, made.stat().st_size, "bytes")


def unpack(archive: str, folder: Path) -> None:
    """Unpack an archive; this user owns the files."""
    command = ["tar", "-xzf", str(DATA / archive), "-C", str(folder), "--no-same-owner"]
    subprocess.run(command, check=True)


def main() -> None:
    """Make them on a boot and a host that exist nowhere else, as far as kvfs can tell."""
    if sys.argv[1:] != ["apart"]:
        command = ["unshare", "--mount", "--uts", sys.executable, __file__, "apart"]
        subprocess.run(command, check=True)
        return
    with tempfile.NamedTemporaryFile("w") as boot:
        boot.write(f"{uuid.uuid4()}\n")
        boot.flush()
        subprocess.run(["mount", "--bind", boot.name, BOOT], check=True)
    subprocess.run(["hostname", "node"], check=True)
    with tempfile.TemporaryDirectory(prefix="kvfs-data-") as made:
        _closed_and_killed(Path(made))
        names = ("closed", "killed", "session")
        _pack(Path(made), "nvme.tar.gz", *names, *(f"{name}.json" for name in names))
    with tempfile.TemporaryDirectory(prefix="kvfs-data-") as made:
        _bucket(Path(made))
        _pack(Path(made), "bucket.tar.gz", "bucket", "spilled", "spilled.json")


if __name__ == "__main__":
    main()
