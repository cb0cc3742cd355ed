"""Objects that only the bucket has are hydrated for an NFS client, too."""

import random

import pytest

from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import wait_for
from tests.nfs.conftest import Exported
from tests.s3.rig import narrow, send_away


@pytest.mark.parametrize("version", [3, 4])
def test_a_spilled_object_is_read_by_nfs(
    mount: Mount, exported: Exported, s3: Server, bucket: str, version: int
) -> None:
    kv = mount(
        f"ram=64M,nvme={{tmp}}/nvme,nvme_size=1G,allow_other,s3=s3://{bucket}/p,"
        f"s3_endpoint={s3.endpoint}"
    )
    data = {f"x{number}": random.Random(number).randbytes(3 << 20) for number in range(3)}
    directory = narrow(kv, "n", 3)
    send_away(directory, data)
    with exported(kv).client(version) as client:
        for name, content in data.items():
            assert client.stat(f"n/{name}").st_size == len(content)
            assert client.read(f"n/{name}") == content
        wait_for(lambda: kv.status()["open_handles"] == 0, "the server has closed them")
