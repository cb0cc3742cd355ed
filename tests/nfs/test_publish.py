"""NFS clients in a namespace where files get their names only at the close."""

import os
import random

from kvfs.control import request
from scripts.nfs_server import Server
from tests.harness import Mounted

SIZE = 300_000


def test_file_of_a_client_has_its_name_at_once(kv: Mounted, nfs: Server) -> None:
    """So the client can rename it while the server still has it open, as after a COMMIT."""
    request(kv.path, "ns_create", name="c", settings={"publish": "close"}, uid=0, gid=0)
    place = kv.path / "c"
    place.chmod(0o777)  # clients are nobody
    data = random.Random(5).randbytes(SIZE)
    with nfs.client(4) as client:
        with client.open("c/k.tmp", os.O_CREAT | os.O_WRONLY) as file:
            file.write(data)
            assert os.listdir(place) == ["k.tmp"]
        client.rename("c/k.tmp", "c/k")
        assert client.read("c/k") == data
    mine = os.open(place / "m", os.O_CREAT | os.O_WRONLY)
    assert os.listdir(place) == ["k"]
    os.write(mine, b"m")
    os.close(mine)
    assert sorted(os.listdir(place)) == ["k", "m"]
