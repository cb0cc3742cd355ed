"""A real mount at a real bucket: compression and metadata of uploads."""

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest

from scripts.s3_server import Server
from tests.connectors.conftest import Client, client, forks  # noqa: F401 (fixtures)
from tests.harness import KVFS, Mounted, wait_for
from tests.s3.rig import narrow, send_away
from tests.s3.test_mounted import (  # noqa: F401 (of which `made` is a fixture)
    SMALL,
    Make,
    all_uploaded,
    attribute,
    keys,
    made,
    s3_of,
    spill,
)


def said(s3: Server, bucket: str, key: str) -> dict[str, str]:
    """The metadata of an object."""
    answer = (
        boto3.session.Session()
        .client("s3", endpoint_url=s3.endpoint)
        .head_object(Bucket=bucket, Key=f"p/{key}")
    )
    found: dict[str, str] = answer["Metadata"]
    return found


def read_counters(kv: Mounted, name: str) -> dict[str, int]:
    spaces: list[dict[str, Any]] = kv.status()["namespaces"]
    return next(one["counters"] for one in spaces if one["name"] == name)


@pytest.mark.clients
def test_the_cache_of_a_model_is_smaller_there(
    made: Make,  # noqa: F811
    client: Client,  # noqa: F811
    s3: Server,
    bucket: str,
    tmp_path: Path,
) -> None:
    client("make_kv.py", tmp_path / "cache", "--tokens", "1024")
    content = (tmp_path / "cache").read_bytes()
    noise = os.urandom(len(content))
    kv = made("ram=32M,nvme={tmp}/nvme,nvme_size=128M")
    told = ["compression=s3", "quota_objects=1"]  # so that the first one leaves for the second
    subprocess.run([*KVFS, "ns", "create", str(kv.path / "n"), *told], check=True)
    assert attribute(kv.path / "n", "compression") == "s3"
    path = kv.path / "n" / "block"
    path.write_bytes(content)
    all_uploaded(kv)
    (kv.path / "n" / "noise").write_bytes(noise)
    all_uploaded(kv)
    there = keys(s3, bucket)
    assert there["n@1/noise"] == len(noise)
    assert len(content) > 1.4 * there["n@1/block"]
    assert said(s3, bucket, "n@1/block")["kvfs-codec"].startswith("blosc-zstd-s")
    os.setxattr(kv.path / "n", "user.kvfs.compression", b"off")
    wait_for(lambda: attribute(path, "tier") == "s3", "only the bucket has it")
    assert path.stat().st_size == len(content)
    assert path.read_bytes() == content
    found = s3_of(kv)
    assert (found["compressed"], found["not_compressed"], found["decompressed"]) == (1, 1, 1)
    assert found["compressed_bytes"] == len(content)
    assert found["compressed_to_bytes"] == there["n@1/block"]
    assert min(found["compress_cpu_us"], found["decompress_cpu_us"]) > 0
    ratio = f"{len(content) / there['n@1/block']:.2f} times smaller"
    shown = subprocess.run(
        [*KVFS, "status", str(kv.path)], capture_output=True, text=True, check=True
    ).stdout
    assert ratio in " ".join(shown.split())
    assert found["hits"] == read_counters(kv, "n")["read_s3"] == 1


def test_a_compressed_copy_on_nvme_goes_up_as_it_is(
    made: Make,  # noqa: F811
    s3: Server,
    bucket: str,
    tmp_path: Path,
) -> None:
    kv = made("ram=32M,nvme={tmp}/nvme,nvme_size=128M")
    folder = kv.path / "n"
    subprocess.run([*KVFS, "set", str(kv.path), "s3_delay=3600"], check=True)
    subprocess.run([*KVFS, "ns", "create", str(folder), "compression=nvme"], check=True)
    (folder / "first").write_bytes(SMALL)  # begins on NVMe, and tells that the next ones may not
    content = bytearray(8 << 20)
    content[0::2] = os.urandom(4 << 20)
    content[1::2] = bytes([0x3F]) * (4 << 20)
    path = folder / "block"
    path.write_bytes(content)
    kv.umount()  # it is copied to NVMe, and not uploaded yet
    stored = max(one.stat().st_size for one in (tmp_path / "nvme" / "objects").rglob("*.*"))
    assert stored < len(content) / 1.8
    kv.mount()
    all_uploaded(kv)
    assert keys(s3, bucket)["n@1/block"] == stored
    assert said(s3, bucket, "n@1/block")["kvfs-codec"].startswith("blosc-zstd-s")
    assert s3_of(kv)["compressed"] == 0, "it was compressed once"
    assert path.read_bytes() == content, "from NVMe"
    subprocess.run([*KVFS, "ns", "set", str(folder), "quota_objects=1"], check=True)
    (folder / "next").write_bytes(SMALL)
    all_uploaded(kv)
    wait_for(lambda: attribute(path, "tier") == "s3", "only the bucket has it")
    assert path.read_bytes() == content
    assert s3_of(kv)["decompressed"] == 1


def test_modes_and_times_get_there_without_the_bytes(
    made: Make,  # noqa: F811
    s3: Server,
    bucket: str,
) -> None:
    kv = made()
    path = kv.path / "a"
    path.write_bytes(SMALL)
    all_uploaded(kv)
    path.chmod(0o640)
    os.utime(path, ns=(1, 2))
    wait_for(lambda: said(s3, bucket, "@0/a")["kvfs-mtime-ns"] == "2", "the time is there")
    all_uploaded(kv)
    assert said(s3, bucket, "@0/a")["kvfs-mode"] == "0640"
    assert s3_of(kv)["uploads"] == 1
    assert s3_of(kv)["upload_bytes"] == len(SMALL)
    assert keys(s3, bucket) == {"@0/a": len(SMALL)}


def test_objects_from_before_the_bucket_are_uploaded(
    made: Make,  # noqa: F811
    s3: Server,
    bucket: str,
) -> None:
    kv = made()
    with_s3 = kv.options
    kv.remount("ram=64M,nvme={tmp}/nvme,nvme_size=512M".replace("{tmp}", str(kv.path.parent)))
    subprocess.run([*KVFS, "ns", "create", str(kv.path / "n"), "media=ram+nvme"], check=True)
    for name in ("a", "b", "n/a"):
        (kv.path / name).write_bytes(SMALL + name.encode())
    kv.remount(with_s3)
    both = {"@0/a", "@0/b"}
    wait_for(lambda: keys(s3, bucket).keys() == both, "what may be there is there")
    subprocess.run([*KVFS, "ns", "set", str(kv.path / "n"), "media=ram+nvme+s3"], check=True)
    wait_for(lambda: keys(s3, bucket).keys() == {*both, "n@1/a"}, "so is what may be now")
    subprocess.run([*KVFS, "ns", "set", str(kv.path / "n"), "media=ram+nvme"], check=True)
    (kv.path / "n" / "b").write_bytes(SMALL)
    (kv.path / "c").write_bytes(SMALL)
    wait_for(lambda: "@0/c" in keys(s3, bucket), "what was written later is there")
    all_uploaded(kv)
    assert keys(s3, bucket).keys() == {*both, "@0/c", "n@1/a"}


def test_open_of_a_replaced_object_gets_old_or_new_bytes(made: Make) -> None:  # noqa: F811
    kv = made("ram=32M,nvme={tmp}/nvme,nvme_size=128M")
    kv.allow_log("writers wait")
    path = kv.path / "a"
    path.write_bytes(b"0" * len(SMALL))
    all_uploaded(kv)
    spill(kv, path)
    done = threading.Event()
    failures: list[OSError] = []
    found: set[bytes] = set()

    def look() -> None:
        while not done.is_set():
            try:
                found.add(path.read_bytes())
            except OSError as error:
                failures.append(error)

    readers = [threading.Thread(target=look) for _ in range(4)]
    for reader in readers:
        reader.start()
    for number in range(50):
        fresh = kv.path / "fresh"
        fresh.write_bytes(b"%d" % (number % 10) * len(SMALL))
        fresh.rename(path)
    done.set()
    for reader in readers:
        reader.join()
    assert not failures
    assert all(len(one) == len(SMALL) and len(set(one)) == 1 for one in found)


def test_a_mount_without_its_bucket_says_so(made: Make) -> None:  # noqa: F811
    tiers = "ram=32M,nvme={tmp}/nvme,nvme_size=128M"
    kv = made(tiers)
    away = narrow(kv, "n")
    contents = {f"f{number}": os.urandom(1000) for number in range(3)}
    send_away(away, contents)
    all_uploaded(kv)
    options = kv.options
    assert kv.status()["without_bucket"] == 0
    kv.remount(f"ram=32M,nvme={kv.path.parent}/nvme,nvme_size=128M")
    kv.expect_log(r"objects are in s3://.* only, and this mount has no bucket: .*mount with s3=")
    kv.idle()
    count = kv.status()["without_bucket"]
    assert count >= len(contents)
    shown = subprocess.run(
        [*KVFS, "status", str(kv.path)], capture_output=True, text=True, check=True
    ).stdout
    assert f"only in s3 {count} objects, which are ENOENT: mount with s3=" in " ".join(
        shown.split()
    )
    assert kv.log.read_text().count("and this mount has no bucket") == 1
    for name in contents:
        assert (away / name).stat().st_size == 1000
        with pytest.raises(FileNotFoundError):
            (away / name).read_bytes()
    kv.remount(options)
    assert {name: (away / name).read_bytes() for name in contents} == contents
