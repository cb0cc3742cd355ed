"""Prefix namespaces under load and after deaths, and `kvfs match`."""

import errno
import json
import os
import random
import subprocess
import threading
from itertools import pairwise
from pathlib import Path

from kvfs import prefix
from tests.conftest import Mount
from tests.harness import KVFS, wait_for
from tests.semantics.test_prefixes import (
    BLOCK,
    ROOT,
    ask,
    blocks,
    chain,
    left,
    named,
    namespace,
    write,
)


def test_prefixes_are_closed(mount: Mount) -> None:
    # While there are evictions, unlinks, and a second life of everything.
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    kv = mount("ram=16M,nvme={tmp}/nvme,nvme_size=48M")
    space = namespace(kv, quota_objects="400")
    known: list[tuple[bytes, bytes]] = [(ROOT, ROOT)]
    problems: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(seed + number)
        for turn in range(60):
            parent = rng.choice(known)[1] if rng.random() < 0.7 else ROOT
            keys = chain(rng.randint(1, 12), parent, salt=rng.randrange(40))
            try:
                write(space, keys, parent)
                known.extend(pairwise([parent, *keys]))
                if not turn % 7 and len(known) > 1:
                    (space / prefix.path(*rng.choice(known[1:]))).unlink(missing_ok=True)
            except OSError as error:  # its prefix has gone, or nothing may go for it
                if error.errno not in {errno.ENOENT, errno.EDQUOT, errno.ENOSPC, errno.ESTALE}:
                    problems.append(repr(error))
            found = ask(space, keys, parent).blocks
            for before, key in list(pairwise([parent, *keys]))[:found]:
                try:
                    data = (space / prefix.path(before, key)).read_bytes()
                except (FileNotFoundError, OSError):
                    break
                if data != key * (BLOCK // 16):
                    problems.append(f"{key.hex()}: {data[:16].hex()}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []

    def closed() -> bool:
        found = blocks(space)
        return set(found.values()) <= {ROOT.hex(), *found} and left(space) == {ROOT.hex(), *found}

    wait_for(closed, "every block has its parent and its directory, and nothing else has one")
    assert kv.status()["counters"]["dropped_evicted"] > 0
    done = subprocess.run(
        [*KVFS, "fsck", str(kv.path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_block_lost_with_ram_ends_its_prefix(mount: Mount) -> None:
    # A machine's death: what RAM had is lost, and what followed it on NVMe goes.
    kv = mount("ram=32M,nvme={tmp}/nvme,nvme_size=64M")
    space = namespace(kv)
    keys = chain(8)
    write(space, keys)
    done = subprocess.run([*KVFS, "evict", str(space)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    write(space, keys[3:4], keys[2])  # anew, in memory
    kv.allow_log("the last session did not end properly")
    ram = kv.status()["tiers"]["ram"]["path"]
    kv.kill()
    subprocess.run(["umount", "-l", ram], check=True)
    kv.mount()
    wait_for(lambda: left(space) == named(ROOT, *keys[:3]), "what follows is gone")
    assert ask(space, keys).blocks == 3


def test_kvfs_match(mount: Mount, tmp_path: Path) -> None:
    # The command, by `.match` and by stat.
    told = prefix.Fingerprint(
        model="m", revision="1", dtype="float16", layout="token:4", block_tokens=4
    )
    space = namespace(mount("ram=32M"))
    os.setxattr(space, "user.kvfs.fingerprint", str(told).encode())
    (space / told.root.hex()).mkdir()
    tokens = list(range(30))
    keys = prefix.block_keys(told.root, tokens, 4)
    write(space, keys[:5], told.root)
    write(space, chain(1, keys[4]), keys[4])
    file = tmp_path / "tokens"
    file.write_text(" ".join(map(str, tokens)))

    def match(*arguments: str, stdin: str = "") -> str:
        command = [*KVFS, "match", str(space), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        return done.stdout if not done.returncode else done.stderr

    found = json.loads(match("--tokens", str(file), "--json"))
    assert sum(found.pop("bytes").values()) == 5 * BLOCK
    assert found == {
        "namespace": str(space),
        "blocks": 5,
        "of_blocks": 7,
        "tokens": 20,
        "of_tokens": 30,
        "block_tokens": 4,
        "asked_by": "match",
        "last": keys[4].hex(),
        "next": {
            "path": prefix.path(keys[4], keys[5]),
            "first_token": 20,
            "tokens": [20, 21, 22, 23],
        },
        "continuations": 1,
    }
    assert "5 of 7 blocks of 4 tokens" in match("--tokens", "-", stdin=json.dumps(tokens))
    whole = match("--tokens", "-", stdin=json.dumps(tokens[:20]))
    assert "nothing: all whole blocks are cached" in whole
    assert "0 of 7" in match("--tokens", str(file), "--shards", "0,1")
    assert "expected token ids" in match("--tokens", "-", stdin="x")
    assert "tokens[1]=-1: expected an int from 0" in match("--tokens", "-", stdin="[1, -1]")
    os.setxattr(space, "user.kvfs.fingerprint", b"other")
    assert "fingerprint='other': expected the JSON of kvfs.client" in match("--tokens", str(file))


def test_kvfs_match_without_prefix_says_why(mount: Mount, tmp_path: Path) -> None:
    told = prefix.Fingerprint(
        model="m", revision="1", dtype="float16", layout="token:4", block_tokens=4
    )
    space = namespace(mount("ram=32M"), prefix="off")
    os.setxattr(space, "user.kvfs.fingerprint", str(told).encode())
    (tmp_path / "tokens").write_text("1 2 3 4")
    command = [*KVFS, "match", str(space), "--tokens", str(tmp_path / "tokens")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    said = " ".join(found.split())
    assert f"prefix=off, so kvfs asked with stat: kvfs ns set {space} prefix=on" in said
    assert "not on the mount" not in said


def test_tree_with_held_directories_is_removed(mount: Mount) -> None:
    # `rm -r` opens a directory, unlinks what is in it and asks for its attributes, while others of
    # its kind go by themselves because their block has.
    kv = mount("ram=16M,nvme={tmp}/nvme,nvme_size=48M")
    space = namespace(kv)
    for salt in range(15):
        keys = chain(12, ROOT, salt=salt)
        (space / ROOT.hex()).mkdir(exist_ok=True)
        write(space, keys)
        held = os.open(space / keys[5].hex(), os.O_RDONLY | os.O_DIRECTORY)
        done = subprocess.run(
            ["rm", "-r", *space.iterdir()], check=False, capture_output=True, text=True
        )
        surprising = [
            line for line in done.stderr.splitlines() if "No such file or directory" not in line
        ]
        assert not surprising, surprising
        assert os.fstat(held).st_nlink <= 2
        assert os.listdir(held) == []
        os.close(held)
        wait_for(lambda: not list(space.iterdir()), "all went")


def test_directories_that_were_never_looked_up_leave_nothing(mount: Mount) -> None:
    # Nobody says that he has forgotten what he never knew.
    kv = mount("ram=16M,nvme={tmp}/nvme,nvme_size=48M")
    space = namespace(kv)
    keys = chain(40, ROOT)
    write(space, keys)
    kv.umount()
    kv.mount()
    (space / prefix.path(ROOT, keys[0])).unlink()
    wait_for(lambda: [path.name for path in space.iterdir()] == [ROOT.hex()], "all went")

    def records() -> int:
        done = subprocess.run(
            [*KVFS, "fsck", kv.path, "--json"], check=True, capture_output=True, text=True
        )
        return int(json.loads(done.stdout)["inodes"])

    wait_for(lambda: records() == 3, "the top, the namespace and the root's directory are left")
