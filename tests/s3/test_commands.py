"""Everyday commands with a real bucket."""

import json
import subprocess

import pytest

from tests.harness import KVFS
from tests.s3.test_mounted import LARGE, SMALL, Make, all_uploaded, attribute, made

__all__ = ["made"]


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("options", ["ram=256M", "ram=256M,nvme={tmp}/nvme,nvme_size=512M"])
def test_object_evicted_to_the_bucket_is_read_again(made: Make, options: str) -> None:
    kv = made(options)
    files = {kv.path / "d/small": SMALL, kv.path / "d/large": LARGE}
    (kv.path / "d").mkdir()
    for path, data in files.items():
        path.write_bytes(data)
    all_uploaded(kv)
    kv.idle()
    found = json.loads(run("stat", kv.path / "d/small", "--json").stdout)
    assert found["tiers"]["s3"]["key"].endswith("d/small")
    assert found["tiers"]["s3"]["current"]
    done = run("evict", kv.path / "d", "--to", "s3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 of 2 files have gone to s3" in done.stdout
    assert {attribute(path, "tier") for path in files} == {"s3"}
    found = json.loads(run("stat", kv.path / "d/small", "--json").stdout)
    assert list(found["tiers"]) == ["s3"]
    assert found["next"] == "nothing is here of it"
    found = json.loads(run("du", kv.path / "d", "--json").stdout)
    assert (found["bytes"], found["objects"]) == (0, 2)
    assert found["by"]["tier"] == {
        "s3": {"bytes": len(SMALL) + len(LARGE), "objects": 2},
    }
    whole, walked = (
        json.loads(run("du", kv.path, "--json", *more).stdout) for more in ((), ("--walk",))
    )
    assert whole["by"]["namespace"] == walked["by"]["namespace"]
    assert whole["by"]["namespace"]["."] == {"bytes": 0, "objects": 2}
    assert {path: path.read_bytes() for path in files} == files


def test_evict_to_s3_keeps_objects_that_the_bucket_lacks(made: Make) -> None:
    kv = made("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    assert run("ns", "create", kv.path / "here", "media=ram+nvme").returncode == 0
    path = kv.path / "here" / "a"
    path.write_bytes(SMALL)
    kv.idle()
    done = run("evict", path, "--to", "s3")
    assert done.returncode == 1
    assert "1 of 1 files stay: it is only here, and s3 is not to have it" in done.stderr
    assert path.read_bytes() == SMALL
    kv.check_gauges()
    assert run("evict", path, "--drop").returncode == 0
    assert not path.exists()
