import errno
import json
import os
import random
import subprocess
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from kvfs import matching, prefix
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.semantics.syscalls import as_nobody, refused

ROOT = prefix.root_key("a fingerprint")
NUMBERS = iter(range(1 << 20))
BLOCK = 4096


def namespace(mounted: Mounted, **settings: str) -> Path:
    name = f"prefixes-{next(NUMBERS)}"
    texts = {"prefix": "on", **settings}
    request(mounted.path, "ns_create", name=name, settings=texts, uid=0, gid=0)
    (mounted.path / name / ROOT.hex()).mkdir()
    return mounted.path / name


@pytest.fixture
def space(shared: Mounted) -> Iterator[Path]:
    made = namespace(shared)
    yield made
    request(shared.path, "ns_drop", name=made.name)


def chain(count: int, parent: bytes = ROOT, *, salt: int = 0) -> list[bytes]:
    return prefix.block_keys(parent, [1000 + salt, *range(count - 1)], 1)


def write(space: Path, keys: Iterable[bytes], parent: bytes = ROOT) -> None:
    for before, key in pairwise([parent, *keys]):
        path = space / prefix.path(before, key)
        unfinished = path.with_name(f"{path.name}.0x.tmp")
        unfinished.write_bytes(key * (BLOCK // len(key)))
        unfinished.rename(path)


def ask(space: Path, keys: list[bytes], parent: bytes = ROOT) -> matching.Answer:
    descriptor = os.open(space / ".match", os.O_RDWR)
    try:
        os.pwrite(descriptor, matching.pack_request(parent, keys, details=True), 0)
        return matching.unpack_answer(os.pread(descriptor, 1 << 20, 0))
    finally:
        os.close(descriptor)


def left(space: Path) -> set[str]:
    return set(os.listdir(space))


def named(*keys: bytes) -> set[str]:
    return {key.hex() for key in keys}


def blocks(space: Path) -> dict[str, str]:
    """The parent of each block that has a name."""
    found = {}
    for above in os.listdir(space):
        try:
            names = os.listdir(space / above)
        except FileNotFoundError:
            continue
        found.update(
            {one.key.hex(): above for name in names if (one := prefix.parse(name)) is not None}
        )
    return found


def test_directories_come_with_blocks(space: Path) -> None:
    """
    In a namespace with `prefix=on` a path is a prefix: `PARENT/KEY`, or `PARENT/KEY.SHARD`, keys as
    32 lower-case hexadecimal digits. The name of a block's file brings the directory `KEY` beside
    `PARENT`, in the same step, whether the file was created, closed (with `publish=close`), renamed
    or linked to it; mode and owner are those of `PARENT`. What stands before first blocks, a root,
    is made by mkdir; a block cannot be made before the one that it follows: ENOENT.
    """
    os.chmod(space / ROOT.hex(), 0o2700)
    created, renamed, linked = chain(3)
    (space / prefix.path(ROOT, created)).write_bytes(b"x")
    assert (space / created.hex()).stat().st_mode & 0o7777 == 0o2700
    write(space, [renamed], created)
    path = space / prefix.path(renamed, linked, "0")
    path.with_name("aside").write_bytes(b"x")
    assert left(space) == named(ROOT, created, renamed)
    os.link(path.with_name("aside"), path)
    assert left(space) == named(ROOT, created, renamed, linked)
    os.setxattr(space, "user.kvfs.publish", b"close")
    (closed,) = chain(1, linked)
    with (space / prefix.path(linked, closed)).open("xb") as file:
        file.write(b"x")
        assert not (space / closed.hex()).exists()
    assert (space / closed.hex()).is_dir()
    assert space.stat().st_nlink == 2 + 5
    with refused(errno.ENOENT):
        write(space, chain(1), b"\1" * 16)


def test_directories_go_with_blocks(space: Path) -> None:
    """
    With the last file of a block its directory goes and all that follows it, whether it was
    unlinked, renamed, evicted, expired or lost: at once where nothing is in it, soon after
    elsewhere. Who has such a directory open gets ESTALE, files are read to their end. If the block
    is there again before that, what follows it stays. A directory that mkdir made, and that no
    block is named as, stays until rmdir, which removes any that is empty.
    """
    keys = chain(5)
    other = chain(2, keys[1], salt=1)
    write(space, keys)
    write(space, other, keys[1])
    (space / prefix.path(keys[3], keys[4])).unlink()
    assert left(space) == named(ROOT, *keys[:4], *other)
    inside = os.open(space / keys[2].hex(), os.O_RDONLY)
    reader = (space / prefix.path(keys[2], keys[3])).open("rb")
    (space / prefix.path(keys[1], keys[2])).unlink()
    wait_for(lambda: left(space) == named(ROOT, *keys[:2], *other), "what follows goes")
    assert reader.read() == keys[3] * (BLOCK // 16)
    reader.close()
    with refused(errno.ESTALE):
        os.listdir(inside)
    os.close(inside)
    (space / prefix.path(ROOT, keys[0])).rename(space / "aside")
    wait_for(lambda: left(space) == {*named(ROOT), "aside"}, "what follows goes")
    (space / ROOT.hex()).rmdir()
    assert left(space) == {"aside"}


def test_blocks_that_are_followed_stay(shared: Mounted) -> None:
    """
    Room is made by dropping blocks that nothing follows, whatever the policy. One in whose
    directory anything is or is being made stays, unless a bucket has it: so a prompt that is larger
    than its quota keeps its beginning, and what does not fit is EDQUOT.
    """
    for policy in ("adaptive", "lru", "fifo", "s3fifo"):
        space = namespace(shared, quota_objects="8", eviction=policy)
        keys = chain(12)
        with refused(errno.EDQUOT):
            write(space, keys)
        assert ask(space, keys).blocks == 8
        other = chain(5, salt=1)
        write(space, other)
        assert ask(space, other).blocks == 5
        assert ask(space, keys).blocks >= 2
        assert left(space) >= named(ROOT, *other, *keys[:2])
        assert set(blocks(space).values()) <= {ROOT.hex(), *blocks(space)}
        request(shared.path, "ns_drop", name=space.name)


def test_prefixes_are_closed(mount: Mount) -> None:
    # The property, with evictions by room and by quota, unlinks and a second life of everything.
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


def test_match(space: Path) -> None:
    """
    `.match` in the directory of such a namespace, which is not listed, answers how many blocks of a
    prompt are cached without a gap, in one pwrite(2) of the question and one pread(2), for whoever
    may search the directory; `kvfs/matching.py` has the format. What is still being written
    does not count, what is closed does. Each descriptor has a question of its own; one that is none
    is EINVAL at the write. Nothing can be made, renamed or removed there: EPERM.
    """
    keys = chain(9)
    write(space, keys[:6])
    assert ".match" not in os.listdir(space)
    answer = ask(space, keys)
    assert (answer.blocks, sum(answer[1:4])) == (6, 6 * BLOCK)
    assert answer.sizes == (BLOCK,) * 6
    with (space / prefix.path(keys[5], keys[6])).open("xb") as file:
        file.write(b"x")
        assert ask(space, keys).blocks == 6
    assert ask(space, keys).blocks == 7
    (space / prefix.path(keys[1], keys[2])).unlink()
    assert ask(space, keys).blocks == 2

    first, second = (os.open(space / ".match", os.O_RDWR) for _ in range(2))
    for descriptor, some in ((first, keys[:1]), (second, keys[5:])):
        os.pwrite(descriptor, matching.pack_request(ROOT, some), 0)
    assert matching.unpack_answer(os.pread(first, 4096, 0)).blocks == 1
    assert matching.unpack_answer(os.pread(second, 4096, 0)).blocks == 0
    many = matching.pack_request(ROOT, keys[:1] + [bytes(16)] * 65535)
    assert os.pwrite(first, many, 0) == len(many), "more than the kernel sends at once"
    assert matching.unpack_answer(os.pread(first, 4096, 0)).blocks == 1
    with refused(errno.EINVAL):
        os.pwrite(first, b"what is there?", 0)
    with refused(errno.EINVAL):
        os.pwrite(first, matching.pack_request(ROOT, keys), 1)
    with refused(errno.ESTALE):
        os.pread(first, 4096, 0)
    os.close(first)
    os.close(second)
    hidden = space / ".match"
    (space / "aside").touch()
    for change in (
        hidden.unlink,
        partial(hidden.rename, space / "other"),
        partial((space / "aside").rename, hidden),
        partial(os.truncate, hidden, 0),
        partial(os.chmod, hidden, 0o600),
    ):
        with refused(errno.EPERM):
            change()
    with refused(errno.EEXIST):
        hidden.mkdir()
    assert as_nobody(space, lambda: os.close(os.open(".match", os.O_RDWR))) == 0
    os.chmod(space, 0o700)
    assert as_nobody(space.parent, lambda: os.open(f"{space.name}/.match", os.O_RDWR)) == (
        errno.EACCES
    )


def test_told_in_time(shared: Mounted, space: Path) -> None:
    """
    Paths are prefixes from a namespace's first one on: the setting of one that has entries cannot
    be changed, which is EINVAL, but together with its version.
    """
    with refused(errno.EINVAL):
        os.setxattr(space, "user.kvfs.prefix", b"off")
    assert os.getxattr(space, "user.kvfs.prefix") == b"on"
    settings = {"prefix": "off", "version": "2"}
    request(shared.path, "ns_set", name=space.name, settings=settings)
    assert not (space / ".match").exists()
    os.setxattr(space, "user.kvfs.prefix", b"on")
    assert (space / ".match").exists()


def test_what_memory_loses(mount: Mount) -> None:
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


def test_kvfs_match(shared: Mounted, tmp_path: Path) -> None:
    # The command, by `.match` and by stat.
    told = prefix.Fingerprint(
        model="m", revision="1", dtype="float16", layout="token:4", block_tokens=4
    )
    space = namespace(shared)
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
    assert "expected ids of tokens" in match("--tokens", "-", stdin="x")
    assert "tokens[1]=-1: expected an int from 0" in match("--tokens", "-", stdin="[1, -1]")
    os.setxattr(space, "user.kvfs.fingerprint", b"other")
    assert "fingerprint='other': expected what kvfs.client" in match("--tokens", str(file))
