"""The commands, counters and metrics of mounts show their pool."""

import json
import os
import re
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import redis

from kvfs import prefix, runtime
from kvfs.cli.pool import facts
from kvfs.control import request
from kvfs.pool.nginx import Nginx
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.pool.test_two_nodes import (
    absent,
    announced,
    change_namespace,
    gets,
    make_namespace,
    node,
    write,
)

MIB = 1 << 20


def run(*arguments: object) -> str:
    command = [*KVFS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def stat(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("stat", path, "--json"))
    return found


def owners(path: Path) -> list[str]:
    """The mount points of the nodes that have a file, the asked one first."""
    return [one["mountpoint"] for one in stat(path)["pool"]["nodes"]]


def index_of(pool: str) -> redis.Redis:
    return redis.Redis(port=int(pool.rpartition(":")[2].partition("/")[0]))


def test_stat_shows_nodes_that_have_a_file(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    assert owners(a.path / "block") == [str(a.path)]
    found = stat(b.path / "block")
    assert (found["tiers"], found["pool"]["remote"], found["pool"]["entry"]) == ({}, True, "same")
    (owner,) = found["pool"]["nodes"]
    assert (owner["mountpoint"], owner["this"]) == (str(a.path), False)
    assert owner["tier"] == next(iter(stat(a.path / "block")["tiers"]))
    assert found["next"] == "nothing is here of it: an open fetches it from another node"
    shown = run("stat", b.path / "block")
    assert "only other nodes have it" in shown
    assert f"{a.path} ({owner['tier']})" in shown
    assert (b.path / "block").read_bytes() == b"x" * MIB
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    assert owners(b.path / "block") == [str(b.path), str(a.path)]
    assert ", this node)" in run("stat", b.path / "block")
    a.umount("--now")
    assert owners(b.path / "block") == [str(b.path)]


def test_stat_says_that_an_object_is_larger_than_the_tiers_here(pool: str, mount: Mount) -> None:
    only_ram = pool.replace("nvme={tmp}/NAME-nvme,nvme_size=256M,", "")
    a, b = node(mount, pool, "a"), node(mount, only_ram, "b")
    write(a, "large", b"x" * (65 * MIB))
    wait_for(lambda: not absent(b.path / "large"), "it is found")
    said = "nothing is here of it, and no tier here can hold it: an open is a miss"
    assert stat(b.path / "large")["next"] == said
    assert not readable(b.path / "large")


def test_umount_says_that_other_nodes_may_have_what_it_loses(pool: str, mount: Mount) -> None:
    only_ram = pool.replace("nvme={tmp}/NAME-nvme,nvme_size=256M,", "")
    a, b = node(mount, pool, "a"), node(mount, only_ram, "b")
    write(a, "block", b"x" * MIB)
    gets(b, "block", b"x" * MIB)
    said = b.umount("--now")
    assert said == (
        "kvfs: 1 objects (1.0 MiB) are lost with RAM: neither NVMe nor the bucket had them; other "
        "nodes of the pool may have some of them\n"
    )
    assert f"unmounted with --now: {said.removeprefix('kvfs: ').strip()}" in b.log.read_text()


def test_file_of_holes_and_second_name_are_of_one_node(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    with (a.path / "holes").open("wb") as file:
        file.truncate(8 * MIB)
    write(a, "first", b"x")
    (a.path / "second").hardlink_to(a.path / "first")
    assert "not announced: mostly holes" in run("stat", a.path / "holes")
    assert stat(a.path / "second")["pool"]["entry"] == "same"
    wait_for(lambda: not a.status()["pool"]["lag_s"], "the index knows all")
    wait_for(lambda: sorted(os.listdir(b.path)) == ["first"], "one name is listed")
    assert absent(b.path / "second")
    assert absent(b.path / "holes")


def test_mode_of_a_directory_is_of_one_node(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    (a.path / "dir").mkdir(mode=0o700)
    write(a, "dir/block", b"x")
    wait_for(lambda: not absent(b.path / "dir"), "it is found")
    assert (b.path / "dir").stat().st_mode & 0o7777 == 0o755


def test_hostile_keys_cost_their_own_names_only(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    a.allow_log("the key .* has a type that kvfs does not give it")
    b.allow_log("the key .* has a type that kvfs does not give it")
    index, other = index_of(pool), "0" * 8 + "-0000-0000-0000-000000000000"
    index.set(f"kvfs:kv:n:{other}", "[" * 100_000)
    index.hset("kvfs:kv:nodes", other, "1" * 5000)
    index.set("kvfs:kv:o:@0/wrong", "x")
    (a.path / "wrong").write_bytes(b"x")
    write(a, "right", b"y")
    index.hset("kvfs:kv:o:@0/right", f"@{other}", f"{'1' * 16} ram 1.1")
    wait_for(lambda: not absent(b.path / "right"), "it is found")
    assert absent(b.path / "wrong")
    assert (b.path / "right").read_bytes() == b"y"
    wait_for(lambda: not a.status()["pool"]["lag_s"], "nothing waits")
    index.delete("kvfs:kv:nodes")
    index.lpush("kvfs:kv:nodes", "x")
    write(a, "more", b"z")
    wait_for(lambda: not absent(b.path / "more"), "it is found, too")
    assert a.status()["pool"]["index"]["up"]


def test_stat_says_that_the_index_does_not_answer(pool: str, mount: Mount) -> None:
    a = node(mount, f"{pool},pool_wait=1", "a")
    a.allow_log("the pool's index is down|the pool learns later of changes")
    write(a, "block", b"x")
    pid = index_of(pool).info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        found = stat(a.path / "block")["pool"]
        assert (found["entry"], found["nodes"]) == ("unknown", [])
        assert "the index does not answer: " in run("stat", a.path / "block")
        wait_for(lambda: not a.status()["pool"]["index"]["up"], "the node sees it")
        words = [*KVFS, "stat", str(a.path / "other")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        said = "No such file or directory, and the pool's index does not answer, so names of other"
        assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: owners(a.path / "block") == [str(a.path)], "the index answers again")


def test_stat_says_that_a_namespace_is_out_of_the_pool(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        make_namespace(kv)
    write(a, "ns/block", b"x" * MIB)
    gets(b, "ns/block", b"x" * MIB)
    change_namespace(b, "pool", "off")
    found = stat(b.path / "ns" / "block")["pool"]
    why = "its namespace has pool=off on this node"
    assert found == {"remote": False, "entry": "none", "why": why, "nodes": []}
    assert why in run("stat", b.path / "ns" / "block")


def test_stat_of_a_mount_without_a_pool(kv: Mounted) -> None:
    (kv.path / "block").write_bytes(b"x")
    assert stat(kv.path / "block")["pool"] is None
    assert absent(kv.path / "none")


def served(kv: Mounted) -> dict[str, int]:
    counters = kv.status()["pool"]["counters"]
    return {name: counters[name] for name in ("served", "served_bytes")}


def place(path: Path) -> int:
    """The place of a file in the order of eviction of its only tier: 0 goes next."""
    found: int = stat(path)["heat"]["orders"][0]["place"]
    return found


def test_read_by_a_peer_is_a_use_here(pool: str, mount: Mount) -> None:
    only_ram = pool.replace("nvme={tmp}/NAME-nvme,nvme_size=256M,", "")
    a, b = node(mount, only_ram, "a"), node(mount, pool, "b")
    run("ns", "set", a.path, "eviction=lru")
    for name in ("old", "new"):
        write(a, name, name.encode() * MIB)
        os.utime(a.path / name, ns=(0, (a.path / name).stat().st_mtime_ns))  # used long ago
    a.idle()
    assert (place(a.path / "old"), place(a.path / "new")) == (0, 1)
    before = stat(a.path / "old")
    assert (b.path / "old").read_bytes() == b"old" * MIB
    wait_for(
        lambda: served(a) == {"served": 1, "served_bytes": 3 * MIB}, "nginx has reported the read"
    )
    assert (place(a.path / "old"), place(a.path / "new")) == (1, 0)
    after = stat(a.path / "old")
    assert after["atime"] > before["atime"]
    assert after["heat"]["opens"] == before["heat"]["opens"]
    assert sum(tier["hits"] for tier in a.status()["tiers"].values()) == 0
    assert "1 reads, 3.0 MiB" in run("pool", a.path)
    assert sum(b.status()["pool"]["fetch_seconds"]["counts"]) == 1


def hits(kv: Mounted) -> dict[str, int]:
    """The opens of the mount by place, those of no place left out."""
    counters = kv.status()["namespaces"][0]["counters"]
    found = {name: counters.get(f"read_{name}", 0) for name in ("ram", "nvme", "pool")}
    return {name: count for name, count in found.items() if count}


def test_open_by_a_fetch_is_a_hit_of_the_pool(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    assert (b.path / "block").read_bytes() == b"x" * MIB
    wait_for(lambda: hits(b) == {"pool": 1}, "the open is counted")
    assert (b.path / "block").read_bytes() == b"x" * MIB
    wait_for(lambda: sum(hits(b).values()) == 2, "the second open is counted")
    assert hits(b)["pool"] == 1
    found = b.status()
    assert found["pool"]["hits"] == 1
    assert sum(found["latencies"]["open"]["pool"]["counts"]) == 1
    assert hits(a) == {}


def test_each_field_of_the_pool_is_documented(pool: str, mount: Mount) -> None:
    kv = node(mount, pool, "a")
    text = (Path(__file__).parents[2] / "SEMANTICS.md").read_text()
    section = text.partition("### Fields of `pool`")[2].partition("\n### ")[0]
    found = json.loads(run("pool", "--json", "--conflicts", kv.path))
    fields = {*found, *found["index"], *found["counters"], *found["nodes"][0]}
    assert set(kv.status()["pool"]) <= fields
    assert not fields - set(re.findall(r"`(\w+)`", section))


def test_the_lease_of_a_node_has_its_load(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    gets(b, "block", b"x" * MIB)

    def loads() -> dict[str, float]:
        """By mount point, as the nodes see each other."""
        found = json.loads(run("pool", "--json", b.path))["nodes"]
        return {one["mountpoint"]: one["load"] for one in found}

    wait_for(lambda: loads()[str(a.path)] > 0, "the lease is renewed after the read")
    assert loads()[str(a.path)] <= MIB
    assert loads()[str(b.path)] == 0


def test_status_and_top_show_the_pool(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    assert (b.path / "block").read_bytes() == b"x" * MIB
    wait_for(lambda: b.status()["pool"]["nodes_live"] == 2, "b sees a")
    shown = re.sub(" +", " ", run("status", b.path))
    for line in ("pool, index answers", "pool, live nodes 2", "pool, fetched 1 objects, 1.0 MiB"):
        assert line in shown
    shown = " ".join(run("top", "--once", "--interval", "0.2", b.path).split())
    assert "pool 2 nodes index up" in shown
    a.umount("--now")
    wait_for(lambda: b.status()["pool"]["nodes_live"] == 1, "b sees that a has left")


def test_index_that_was_not_asked_yet_is_not_down(pool: str, mount: Mount) -> None:
    a = node(mount, pool, "a")
    wait_for(lambda: a.status()["pool"]["index"]["asked"], "a asks the index")
    index = {"up": False, "why": "it was not asked yet", "asked": False}
    told = dict(facts(a.status()["pool"] | {"index": index}))
    assert (told["index"], told["live nodes"]) == ("not asked yet", "1")


def test_wrong_reports_are_counted_and_ignored(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    reports = runtime.runtime_dir(a.path) / "nginx" / "reports"
    ino = (a.path / "block").stat().st_ino
    wrong = [b"", b"x", b"\xff" * 4000, b"<190>x kvfs: /ram/../../etc 200 1"]
    unknown = [
        f"<190>x kvfs: /ram/00/{ino:x}.ffff 200 1".encode(),
        b"<190>x kvfs: /ram/00/" + b"f" * 64 + b".1 200 1",
        b"<190>x kvfs: /ram/00/fffff.1 404 1",
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        for datagram in (*wrong, *unknown):
            sending.sendto(datagram, str(reports))

    def counters() -> dict[str, int]:
        found: dict[str, int] = a.status()["pool"]["counters"]
        return found

    wait_for(lambda: counters()["served_failed"] == 1, "the last one is read")
    assert (counters()["reports_wrong"], counters()["served"]) == (len(wrong), 2)
    assert (b.path / "block").read_bytes() == b"x" * MIB
    wait_for(lambda: counters()["served"] == 3, "a true report is counted as before")


def test_reads_are_counted_by_the_next_daemon(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    a.kill_daemon()
    wait_for(lambda: a.status()["pool"]["serves"], "a new daemon serves")
    assert (b.path / "block").read_bytes() == b"x" * MIB
    wait_for(lambda: served(a)["served"] == 1, "nginx reports to the new daemon")


def news(kv: Mounted, what: str) -> list[dict[str, Any]]:
    """The events of one kind about the pool."""
    found = request(kv.path, "events")["events"]
    return [one for one in found if one["kind"] == "pool" and one["what"] == what]


def test_events_tell_of_nodes(pool: str, mount: Mount) -> None:
    a = node(mount, pool, "a")
    wait_for(lambda: a.status()["pool"]["index"]["up"], "a has a lease")
    wait_for(lambda: a.status()["pool"]["nodes_live"] == 1, "a has looked")
    b = node(mount, pool, "b")
    (event,) = wait_for(lambda: news(a, "node joined"), "b joins")
    assert event["nodes"].endswith(f":{b.path}")
    assert event["live"] == 2
    b.umount("--now")
    wait_for(lambda: news(a, "node left"), "b leaves")
    assert "node left" in (a.path / ".kvfs" / "events").read_text()


def test_events_tell_of_the_index(pool: str, mount: Mount) -> None:
    a = node(mount, pool, "a")
    a.allow_log("the pool's index is down|the pool learns later of changes")
    wait_for(lambda: a.status()["pool"]["index"]["up"], "a has a lease")
    index = index_of(pool)
    index.flushall()
    wait_for(lambda: news(a, "index empty"), "a sees that the data are lost")
    pid = index.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        (event,) = wait_for(lambda: news(a, "index down"), "a sees that the index is down")
        assert event["why"]
        assert re.search("live nodes +1, before the index was down", shown(a))
        assert "the nodes are not known: the index does not answer" in shown(a)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: news(a, "index up"), "the index is back")


def test_events_tell_of_nginx(pool: str, mount: Mount) -> None:
    a = node(mount, pool, "a")
    a.allow_log("the nginx of the pool has ended")
    wait_for(lambda: a.status()["pool"]["serves"], "nginx serves")
    for pid in Nginx(runtime.runtime_dir(a.path) / "nginx").pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: news(a, "nginx started"), "nginx serves again")
    assert len(news(a, "nginx ended")) == 1


def test_master_of_nginx_that_ends_alone_is_started_again(pool: str, mount: Mount) -> None:
    """Also one that a former daemon has started."""
    a = node(mount, pool, "a")
    a.allow_log("the nginx of the pool has ended")
    server = Nginx(runtime.runtime_dir(a.path) / "nginx")
    wait_for(lambda: a.status()["pool"]["serves"], "nginx serves")
    a.kill_daemon()
    wait_for(lambda: a.status()["pool"]["serves"], "a new daemon serves")
    for count in (1, 2):
        master, *workers = server.pids
        os.kill(master, signal.SIGKILL)
        wait_for(lambda: len(news(a, "nginx started")) == count, "nginx serves again")  # noqa: B023
        assert not {master, *workers} & set(server.pids)
        assert len(news(a, "nginx ended")) == count


def test_events_tell_of_one_conflict_in_a_directory(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    index, names = index_of(pool), ("one", "two")
    for name in names:
        write(a, name, b"of a")
        a.idle()  # a node announces an object again after its copy to NVMe
        wait_for(lambda: not a.status()["pool"]["lag_s"], "all is announced")
        index.rename(f"kvfs:kv:o:@0/{name}", f"aside-{name}")  # so that b does not find it
        wait_for(partial(absent, b.path / name), "it is not found")
        with (b.path / name).open("wb") as file:
            file.write(b"of b")
            index.rename(f"aside-{name}", f"kvfs:kv:o:@0/{name}")
    wait_for(lambda: b.status()["pool"]["counters"]["conflicts"] == 2, "b notices")
    (event,) = news(b, "conflict")
    assert event["path"] in names, "a turn may tell of both"
    assert event["conflicts"] in {1, 2}


def test_mount_says_that_it_serves_nobody(pool: str, mount: Mount, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    a = node(mount, pool.replace("{tmp}", str(private)), "a")
    a.allow_log("this node serves no other node of the pool")
    said = "this node serves no other node of the pool: nvme tier: "
    (line,) = (one for one in a.said.splitlines() if said in one)
    assert f"cannot pass {private}: setfacl -m u:" in line
    assert said not in node(mount, pool, "b").said


def test_dead_node_keeps_its_name(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    wait_for(lambda: b.status()["pool"]["nodes_live"] == 2, "b sees a")
    identity = a.status()["pool"]["node"]
    a.kill()
    index = index_of(pool)
    index.delete(f"kvfs:kv:n:{identity}")  # as after 10 s
    row = rf"^ *{socket.gethostname()}:{a.path} +nowhere +gone for"
    assert re.search(row, shown(b), re.MULTILINE)
    assert "no object of this node is in conflict" in run("pool", "--conflicts", b.path)
    index.hset("kvfs:kv:names", identity, b"\x1b[2J:/\xff\n")
    assert re.search(r"^ *\\x1b\[2J:/\ufffd\\n +nowhere", shown(b), re.MULTILINE)
    index.hdel("kvfs:kv:names", identity)
    assert re.search(rf"^ *{identity} +nowhere", shown(b), re.MULTILINE)
    a.expect_log("the last session did not end properly")
    a.mount()  # it ends the nginx of the killed daemon


def shown(kv: Mounted) -> str:
    return run("pool", kv.path)


def test_peer_that_gives_nothing_is_named(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, f"{pool},pool_wait=1", "b")
    write(a, "block", b"x" * MIB)
    wait_for(lambda: not absent(b.path / "block"), "it is found")
    workers = Nginx(runtime.runtime_dir(a.path) / "nginx").pids
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert not readable(b.path / "block")
        (failing,) = wait_for(lambda: b.status()["pool"]["failing"], "b notes the failure")
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    assert failing["node"] == a.status()["pool"]["node"]
    assert failing["name"] == f"{socket.gethostname()}:{a.path}"
    assert "timed out" in failing["why"]
    name = re.escape(failing["name"])
    said = rf"gave no object +{name} at the last request to it, 0 d 00:00:\d\d ago: peer 127.0.0.1:"
    assert re.search(said, shown(b))
    assert [one["nodes"] for one in news(b, "node fails")] == [failing["name"]]
    wait_for(lambda: readable(b.path / "block"), "a gives it")
    assert b.status()["pool"]["failing"] == []


def readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except FileNotFoundError:
        return False


FINGERPRINT = {
    "model": "m",
    "revision": "r",
    "dtype": "bfloat16",
    "layout": "token=2",
    "block_tokens": 2,
}


def test_match_counts_the_bytes_of_other_nodes(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        settings = {"prefix": "on", "fingerprint": json.dumps(FINGERPRINT)}
        request(kv.path, "ns_create", name="blocks", settings=settings, uid=0, gid=0)
    root = prefix.Fingerprint(**FINGERPRINT).root  # type: ignore[arg-type]
    (key,) = prefix.block_keys(root, [1, 2], 2)
    (a.path / "blocks" / root.hex()).mkdir()
    write(a, f"blocks/{prefix.path(root, key)}", b"x" * MIB)
    tokens = a.path.with_name("tokens")
    tokens.write_text("1 2")
    matched = partial(run, "match", b.path / "blocks", "--tokens", tokens)
    told = r"elsewhere only +1.0 MiB \(s3 or other nodes\)"
    wait_for(lambda: re.search(told, matched()), "the index answers in time")
    assert json.loads(matched("--json"))["bytes"] == {"ram": 0, "nvme": 0, "s3": MIB}


def test_names_of_other_nodes_are_no_damage(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    wait_for(lambda: not absent(b.path / "block"), "it is found")
    done = subprocess.run(
        [*KVFS, "fsck", "--repair", b.path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "lost" in done.stdout) == (0, False), done.stdout
    gets(b, "block", b"x" * MIB)
