"""Requests about namespaces on the control socket, and their answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.catalog import ROOT_INO
from kvfs.cli.ns import _list
from kvfs.core.admin import administration
from kvfs.errors import ConfigError, ExistsError, KvfsError, NotFoundError
from kvfs.settings import Settings
from tests.unit.world import World, world

BYTES = b"k" * 10_000
COST = 12_288


async def ask(made: World, verb: str, **arguments: object) -> dict[str, Any]:
    """As it goes over the socket."""
    arguments = json.loads(json.dumps(arguments))
    found = await administration.handlers(made.lifecycle)[verb](**arguments)
    answer: dict[str, Any] = json.loads(json.dumps(found))
    return answer


def test_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def case(made: World) -> None:
        found = await ask(made, "ns_create", name="a", settings={"weight": "7"}, uid=3, gid=4)
        assert (found["name"], found["own"], found["settings"]["weight"]) == ("a", True, "7")
        assert made.find(b"a").uid == 3
        found = await ask(made, "ns_set", name="a", settings={"eviction": "lru"})
        assert found["settings"]["eviction"] == "lru"
        assert found["changed"] == {"eviction": ["adaptive", "lru"]}
        found = await ask(made, "ns_set", name="a", settings={"eviction": "lru"})
        assert found["changed"] == {}
        inode = await made.make_file(b"a/x", BYTES)
        await made.read(inode.ino)
        found = await ask(made, "ns_show", name="a")
        assert (found["bytes"], found["objects"]) == (COST, 1)
        assert found["tiers"] == {"nvme": {"bytes": COST, "objects": 1}}
        assert found["counters"] == {
            "written": 1,
            "written_bytes": len(BYTES),
            "read_nvme": 1,
            "read_bytes": len(BYTES),
        }
        made.mkdir(b"plain")
        found = await ask(made, "ns_show", name="plain")
        assert (found["own"], found["objects"]) == (False, 0)
        found = await ask(made, "ns_show", name=".")
        assert (found["own"], found["name"]) == (True, ".")
        ino = made.find(b"a").ino
        assert await ask(made, "ns_drop", name="a") == {"dropped": ino, "before": False}
        with pytest.raises(NotFoundError, match="mount, it was dropped, and 1 objects are to go"):
            await ask(made, "ns_show", name="a")
        found = await ask(made, "ns_list")
        assert [one["name"] for one in found["namespaces"]] == ["."]
        assert found["dropped"] == [
            {"ino": ino, "name": "a", "bytes": COST, "objects": 1, "reason": "asked"}
        ]
        await made.walk()
        made.namespace("b")
        await ask(made, "ns_set", name="b", settings={"version": "2"})
        found = await ask(made, "ns_list")
        assert [(one["name"], one["reason"]) for one in found["dropped"]] == [("b", "version")]
        _list(found)
        assert (
            "namespace b has a new version: kvfs has yet to free 0 obj" in capsys.readouterr().out
        )
        await made.walk()
        assert (await ask(made, "ns_list"))["dropped"] == []

    with world(tmp_path) as made:
        trio.run(case, made)


def test_refused_request_changes_nothing(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", weight="7")
        refusals: list[tuple[str, dict[str, object], type[KvfsError]]] = [
            ("ns_create", {"name": "b", "settings": {"x": "1"}, "uid": 0, "gid": 0}, ConfigError),
            ("ns_set", {"name": "a", "settings": {"weight": "0", "pin": "on"}}, ConfigError),
            ("ns_set", {"name": "b", "settings": {}}, NotFoundError),
            ("ns_show", {"name": "b"}, NotFoundError),
            ("ns_show", {"name": ""}, ConfigError),
            ("ns_drop", {"name": "b"}, NotFoundError),
            ("ns_drop", {"name": "."}, ConfigError),
        ]
        before = await ask(made, "ns_list")
        for verb, arguments, kind in refusals:
            with pytest.raises(kind):
                await ask(made, verb, **arguments)
        assert await ask(made, "ns_list") == before

    with world(tmp_path) as made:
        trio.run(case, made)


def test_repeated_request_may_have_been_carried_out(tmp_path: Path) -> None:
    """By a daemon that died without an answer: the next one is told that it is asked again."""

    async def case(made: World) -> None:
        made.mkdir(b"plain")
        made.templates = lambda _: Settings.parse({"ttl": "2h"})
        for name, ttl in (("plain", "0"), ("new", "2h")):
            asked: dict[str, Any] = {"name": name, "uid": 0, "gid": 0}
            asked["settings"] = {"weight": "7"}
            first = await ask(made, "ns_create", **asked)
            assert first["settings"]["ttl"] == ttl
            assert await ask(made, "ns_create", **asked, again=True) == first
            with pytest.raises(ExistsError):
                await ask(made, "ns_create", **asked)
            asked["settings"] = {"weight": "8"}
            with pytest.raises(ExistsError):
                await ask(made, "ns_create", **asked, again=True)
        ino = (await ask(made, "ns_drop", name="new"))["dropped"]
        made.namespace("new")
        last = (await ask(made, "ns_drop", name="new", again=True))["dropped"]
        assert last > ino
        made.restart()
        await made.census()
        answer = {"dropped": last, "before": True}
        assert await ask(made, "ns_drop", name="new", again=True) == answer
        with pytest.raises(NotFoundError):
            await ask(made, "ns_drop", name="new")
        await made.walk()
        answer = {"dropped": 0, "before": True}
        assert await ask(made, "ns_drop", name="new", again=True) == answer

    with world(tmp_path) as made:
        trio.run(case, made)


def test_models_and_the_hottest_objects_are_listed(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a")
        made.mkdir(b"a/d")
        names = [b"a/d/m%% \xff@1@0@%x@half.data" % number for number in range(3)]
        inodes = [await made.make_file(name, BYTES) for name in names]
        for times, inode in enumerate(inodes):
            for _ in range(times + 1):
                await made.read(inode.ino)
        found = await ask(made, "ns_list")
        assert found["models"] == [
            {"engine": "lmcache", "model": "m% \udcff", "objects": 3, "bytes": 3 * COST}
        ]
        assert (await ask(made, "ns_show", name="a"))["models"] == found["models"]
        assert (await ask(made, "ns_show", name="."))["models"] == []
        paths = [name.decode("utf-8", "surrogateescape") for name in names]
        assert found["hot"] == [
            {"path": paths[number], "opens": number + 1} for number in (2, 1, 0)
        ]
        made.tree.unlink(made.at(b"a/d").ino, names[2].rpartition(b"/")[2])
        assert [one["path"] for one in (await ask(made, "ns_list"))["hot"]] == paths[1::-1]
        made.drop("a")
        found = await ask(made, "ns_list")
        assert (found["hot"], [one["objects"] for one in found["models"]]) == ([], [2])
        await made.walk()
        found = await ask(made, "ns_list")
        assert (found["hot"], found["models"]) == ([], [])

    with world(tmp_path) as made:
        trio.run(case, made)


def test_a_listing_begins_with_the_mount_itself(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        for name in ("b", "a", "c\udcff"):
            made.namespace(name)
        made.renames.rename(ROOT_INO, b"b", ROOT_INO, b"z", 0)
        found = await ask(made, "ns_list")
        assert [one["name"] for one in found["namespaces"]] == [".", "z", "a", "c\udcff"]

    with world(tmp_path) as made:
        trio.run(case, made)
