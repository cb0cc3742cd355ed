"""A daemon whose storage refuses calls: the environment arms its fail points."""

import errno
import random

import pytest

from kvfs import failpoints
from tests.conftest import Mount

BYTES = random.Random(1).randbytes(1 << 20)


def test_a_refused_rename_is_an_error_and_the_file_stays(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "tiers.rename=raise:EIO@1")
    kv = mount("ram=256M,nvme={tmp}/nvme,nvme_size=2G")
    kv.expect_log(r"rename of .*fail point tiers\.rename")
    path = kv.path / "file"
    path.write_bytes(BYTES)
    kv.idle()  # its RELEASE has come: a second writer beside the first would rename nothing
    with pytest.raises(OSError, match="file") as caught:
        path.open("r+b")
    assert caught.value.errno == errno.EIO
    assert path.read_bytes() == BYTES
    with path.open("r+b") as file:
        file.write(b"again")
    assert path.read_bytes() == b"again" + BYTES[5:]
