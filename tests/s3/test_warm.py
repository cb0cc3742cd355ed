"""A real mount with a real bucket: objects hydrated before an open, and fetches of a scan."""

import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.s3.test_mounted import all_uploaded, attribute, s3_of

MIB = 1 << 20
_dice = random.Random(7)
BLOCK = _dice.randbytes(64 << 10)

Make = Callable[[str], Mounted]


@pytest.fixture
def made(s3: Server, bucket: str, mount: Mount) -> Make:
    """`made(options)` mounts with that bucket."""

    def make(options: str) -> Mounted:
        return mount(
            f"{options},nvme={{tmp}}/nvme,s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},"
            "s3_region=us-east-1,s3_delay=0.1"
        )

    return make


def content(number: int) -> bytes:
    return b"%08d" % number + BLOCK


def spilled(kv: Mounted, names: list[str]) -> list[Path]:
    """Files below `n`, made one after the other, that only the bucket has."""
    space = kv.path / "n"
    paths = [space / name for name in names]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(number))
    all_uploaded(kv)
    os.setxattr(space, "user.kvfs.quota_hard", b"4K")  # so that none of them may stay
    wait_for(lambda: {attribute(path, "tier") for path in paths} == {"s3"}, "they are spilled")
    os.setxattr(space, "user.kvfs.quota_hard", b"0")
    kv.idle()
    return paths


def vllm(blocks: int, ranks: int) -> list[str]:
    return [
        f"m_0123456789ab_r{rank}/{block % 7:03x}/{block % 5:02x}_g0/{block * 7919:016x}.bin"
        for block in range(blocks)
        for rank in range(ranks)
    ]


def lmcache(blocks: int) -> list[str]:
    return [f"lm/m@1@0@{number * 7919:032x}@bfloat16.data" for number in range(blocks)]


@pytest.mark.parametrize("names", [vllm(12, 2), lmcache(24)], ids=["vllm", "lmcache"])
def test_the_next_blocks_of_a_prefix_come_before_they_are_opened(
    made: Make, names: list[str]
) -> None:
    kv = made("ram=32M,nvme_size=64M")
    paths = spilled(kv, names)
    assert paths[0].read_bytes() == content(0)
    step = 2 if "_r1" in names[1] else 1
    assert paths[step].read_bytes() == content(step)
    wait_for(lambda: s3_of(kv)["prefetched"] == 4 * step, "the next four are here")
    for number, path in enumerate(paths):
        assert path.read_bytes() == content(number)
    found = s3_of(kv)
    assert found["downloads"] == len(paths)
    assert found["prefetch_used"] == found["prefetched"] > len(paths) // 2
    assert found["prefetch_wasted"] == 0


def test_a_tree_is_warmed(made: Make) -> None:
    kv = made("ram=32M,nvme_size=64M")
    paths = spilled(kv, [f"d/{number % 4}/{number}" for number in range(40)])
    done = subprocess.run(
        [*KVFS, "warm", str(kv.path / "n" / "d")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("40 of 40 files are warm")
    assert {attribute(path, "tier") for path in paths} == {"ram+s3"}
    assert s3_of(kv)["warmed"] == s3_of(kv)["downloads"] == 40
    assert [path.read_bytes() for path in paths] == [content(number) for number in range(40)]


def test_warm_without_wait_and_of_too_many_objects(made: Make) -> None:
    kv = made("ram=32M,nvme_size=64M")
    kv.allow_log("writers wait|the NVMe tier has no room")
    big = [kv.path / "big" / str(number) for number in range(16)]
    big[0].parent.mkdir()
    for path in big:
        path.write_bytes(os.urandom(12 * MIB))
    all_uploaded(kv)
    subprocess.run([*KVFS, "warm", "--no-wait", str(big[0].parent)], check=True)
    done = subprocess.run(
        [*KVFS, "warm", *map(str, big)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no tier has room that is free, or was not used lately" in done.stderr
    outside = subprocess.run(
        [*KVFS, "warm", str(kv.path.parent)], capture_output=True, text=True, check=False
    )
    assert outside.returncode == 2
    assert "is on no mount of kvfs" in outside.stderr


def test_interrupt_cancels_objects_that_are_not_begun(made: Make) -> None:
    kv = made("ram=32M,nvme_size=64M")
    paths = spilled(kv, [f"d/{number}" for number in range(400)])
    command = subprocess.Popen([*KVFS, "warm", str(kv.path / "n" / "d")], stderr=subprocess.PIPE)
    try:
        wait_for(lambda: s3_of(kv)["warmed"], "it has begun")
        command.send_signal(signal.SIGINT)
        _, told = command.communicate(timeout=60)
    finally:
        command.kill()
    assert command.returncode == 130
    assert b"stopped: " in told
    assert attribute(kv.path / "n" / "d", "warm") == "0"

    def here() -> int:
        return sum(attribute(path, "tier") != "s3" for path in paths)

    wait_for(lambda: s3_of(kv)["warmed"] == here(), "what was begun is over")
    assert here() < 400


def test_the_attribute_warms(made: Make) -> None:
    kv = made("ram=32M,nvme_size=64M")
    paths = spilled(kv, [f"d/{number}" for number in range(8)])
    directory = kv.path / "n" / "d"
    assert attribute(paths[0], "warm") == "0"
    os.setxattr(directory, "user.kvfs.warm", b"1")
    wait_for(lambda: attribute(directory, "warm") == "0", "all is here")
    assert {attribute(path, "tier") for path in paths} == {"ram+s3"}
    with pytest.raises(OSError, match="Invalid argument"):
        os.setxattr(directory, "user.kvfs.warm", b"yes")
    kv.expect_log("user.kvfs.warm is refused: attribute user.kvfs.warm: expected 1")


def test_a_look_fetches_nothing(made: Make) -> None:
    kv = made("ram=32M,nvme_size=64M")
    paths = spilled(kv, [f"d/{number}" for number in range(20)])
    for path in paths:
        assert path.stat().st_size == len(content(0))
        assert os.access(path, os.R_OK)
        assert os.listxattr(path) == []
    subprocess.run(["ls", "-laR", str(kv.path)], check=True, capture_output=True)
    subprocess.run(["find", str(kv.path), "-size", "+1k"], check=True, capture_output=True)
    assert len(list(os.scandir(paths[0].parent))) == 20
    assert s3_of(kv)["downloads"] == 0
    assert {attribute(path, "tier") for path in paths} == {"s3"}
