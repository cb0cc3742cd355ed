"""Large directories, and clients at the same time."""

import random
import stat
import threading
from collections import Counter
from functools import partial

import pytest

from kvfs.catalog import Catalog, Dentry, Inode
from scripts.nfs_server import Server
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.nfs.conftest import Exported

MIB = 1 << 20
NAMES = 100_000


def many_fifos(catalog: Catalog, name: bytes) -> None:
    """A directory of NAMES fifos, which are only names in the catalog, made without a mount."""
    root = catalog.inode(1)
    assert root is not None

    def add(parent: Inode, name: bytes, mode: int) -> Inode:
        number = catalog.next_id()
        inode = Inode(
            *(number, mode, 0, 0), atime_ns=1, mtime_ns=1, ctime_ns=1, links=((parent.ino, number),)
        )
        batch.put(inode)
        batch.link(parent.ino, Dentry(name, number, number))
        return inode

    with catalog.batch() as batch:
        directory = add(root, name, stat.S_IFDIR | 0o755)
        root.subdirs += 1
        batch.put(root)
        for at in range(NAMES):
            add(directory, b"%d" % at, stat.S_IFIFO | 0o644)


@pytest.mark.slow
def test_a_directory_of_many_names_is_listed_whole(mount: Mount, exported: Exported) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=1G,allow_other")
    kv.umount()
    catalog = Catalog(kv.path.parent / "nvme" / "catalog")
    many_fifos(catalog, b"d")
    catalog.close()
    kv.mount()
    with exported(kv).client() as client:
        found = Counter(entry.name for entry in client.listdir("d"))
    assert set(found.values()) == {1}
    assert found.keys() - {b".", b".."} == {b"%d" % at for at in range(NAMES)}


def test_clients_at_the_same_time(kv: Mounted, nfs: Server) -> None:
    """Each writes objects under temporary names and renames them; the other one reads them."""
    rounds, failures = 8, []  # NFSv3 keeps files open for seconds, each with the room it may need
    data = random.Random(3).randbytes(MIB)

    def content(who: int, number: int) -> bytes:
        return data[who * 1000 + number :]

    def work(who: int) -> None:
        try:
            with nfs.client() as client:
                for number in range(rounds):
                    client.write(f"{who}.tmp", content(who, number))
                    client.rename(f"{who}.tmp", f"{who}-{number}")
                    other = f"{1 - who}-{number}"
                    wait_for(partial(client.exists, other), other)
                    assert client.read(other) == content(1 - who, number)
        except BaseException as error:  # noqa: BLE001 - it is shown by the test
            failures.append(error)

    workers = [threading.Thread(target=work, args=(who,)) for who in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == [], kv.status()["errors"]
    assert sorted(path.name for path in kv.path.iterdir()) == sorted(
        f"{who}-{number}" for who in (0, 1) for number in range(rounds)
    )
