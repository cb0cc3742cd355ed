"""Namespaces are made, told, switched and dropped; what is refused is refused with its reason."""

import stat
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from kvfs.catalog import ROOT_INO
from kvfs.errors import (
    CatalogError,
    ConfigError,
    ExistsError,
    KvfsError,
    NoAttributeError,
    NotFoundError,
    QuotaError,
)
from kvfs.settings import Settings
from tests.unit.world import MIB, World, world

BYTES = b"k" * 10_000


def run(case: Callable[[World], Awaitable[None]], tmp_path: Path, **options: int) -> None:
    with world(tmp_path, **options) as made:
        trio.run(case, made)


def refusal(call: Callable[[], object], kind: type[KvfsError] = ConfigError) -> str:
    with pytest.raises(kind) as refused:
        call()
    assert type(refused.value) is kind
    return str(refused.value)


# Made


def test_a_new_namespace_is_an_empty_directory_of_its_maker(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        space = made.lifecycle.make("a", {"quota_hard": "1M"}, uid=7, gid=8)
        inode = made.find(b"a")
        assert (inode.uid, inode.gid, inode.mode) == (7, 8, stat.S_IFDIR | 0o755)
        assert space is made.ledger.namespaces.own(inode.ino)
        assert inode.namespace == inode.ino == space.ino
        assert space.settings == Settings.parse({"quota_hard": "1M"})
        assert made.find(b"a").nlink == 2
        assert made.tree.inode(ROOT_INO).nlink == 3
        made.check()


def test_a_directory_that_is_there_becomes_one_with_all_in_it(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.mkdir(b"a")
        made.mkdir(b"a/deep")
        ino = (await made.make_file(b"a/deep/x", BYTES)).ino
        default = made.ledger.namespaces.default
        assert (default.objects, default.bytes) == (1, 12288)
        space = made.namespace("a", pin="on")
        await made.walk()
        assert (default.objects, default.bytes) == (0, 0)
        assert (space.objects, space.bytes) == (1, 12288)
        assert made.tree.inode(ino).namespace == space.ino
        made.check()

    run(case, tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a/", "a\0b"])
def test_a_namespace_is_one_name_at_the_top(tmp_path: Path, name: str) -> None:
    with world(tmp_path) as made:
        said = f"namespace {name!r}: expected the name of a top-level directory"
        assert refusal(lambda: made.namespace(name)) == said
        if name != ".":
            assert refusal(lambda: made.tell(name, pin="on")) == said
            assert refusal(lambda: made.drop(name)) == said


def test_refused_namespace_changes_nothing(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await made.store(b"file", BYTES)
        made.namespace("a", quota_hard="1M")
        for call, kind, said in (
            (
                lambda: made.namespace("b", quotta="1"),
                ConfigError,
                "unknown setting 'quotta'; did you mean quota_soft or quota_hard?",
            ),
            (
                lambda: made.namespace("b", media="ram+s3"),
                ConfigError,
                (
                    "setting media=ram+s3: this mount has no s3 tier, expected some of nvme+ram, "
                    "or all"
                ),
            ),
            (
                lambda: made.namespace("a"),
                ExistsError,
                (
                    "namespace a exists: change it with kvfs ns set; kvfs ns show --for CONNECTOR "
                    "prints its engine's configuration"
                ),
            ),
            (
                lambda: made.namespace("file"),
                NotFoundError,
                "namespace file: expected a directory, found a file",
            ),
            (
                lambda: made.tell("c", pin="on"),
                NotFoundError,
                (
                    "namespace c: there is no such directory at the top of the mount; kvfs ns "
                    "create makes one"
                ),
            ),
            (
                lambda: made.tell("a", quota_soft="2M"),
                ConfigError,
                (
                    "setting quota_soft=2M contradicts quota_hard=1M: a soft quota is at most the "
                    "hard quota"
                ),
            ),
        ):
            assert refusal(call, kind) == said
        assert [entry.name for entry in made.catalog.entries_after(ROOT_INO, 0, 9)] == [
            b"file",
            b"a",
        ]
        assert made.lifecycle.settings(made.find(b"a")) == Settings(quota_hard=MIB)
        assert len(made.ledger.namespaces) == 2
        made.check()

    run(case, tmp_path)


def test_new_namespace_begins_with_its_template(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        template = Settings(quota_hard=MIB, ttl=60)
        made.templates = lambda name: template if name.startswith("t") else None
        made.mkdir(b"t1")
        assert made.lifecycle.settings(made.find(b"t1")) == template
        assert made.ledger.namespaces.own(made.find(b"t1").ino)
        assert made.namespace("t2", weight="7").settings == template.changed({"weight": "7"})
        made.mkdir(b"u")
        made.mkdir(b"u/t3")
        assert not made.ledger.namespaces.own(made.at(b"u/t3").ino), "not at the top"
        said = refusal(lambda: made.namespace("t4", pin="on"))
        assert said == (
            "setting pin=on contradicts ttl=1m: a pinned object never expires: give pin=off or "
            "ttl=0"
        )
        assert made.catalog.lookup(ROOT_INO, b"t4") is None, "half of it was made"
        made.check()


def test_a_commit_that_fails_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(tmp_path) as made:
        made.namespace("a", quota_hard="1M")
        inode = made.find(b"a")

        def fail(*_: object, **__: object) -> None:
            raise CatalogError("full")

        with monkeypatch.context() as patch:
            patch.setattr(made.catalog, "commit", fail)
            for call in (
                lambda: made.namespace("b"),
                lambda: made.tell("a", pin="on"),
                lambda: made.tell("a", version="2"),
                lambda: made.drop("a"),
            ):
                refusal(call, CatalogError)
        assert made.find(b"a") == inode
        assert made.lifecycle.settings(inode) == Settings(quota_hard=MIB)
        assert not made.ledger.namespaces.dropped
        assert made.gone == []
        made.check()


# Told


def test_media_that_a_later_mount_lacks_stand_in_nobodys_way(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.namespace("a", media="ram")
        made.ledger.tiers.local = made.ledger.tiers.local[1:]
        assert made.tell("a", weight="50").settings == Settings(media=("ram",), weight=50)
        assert "this mount has no ram tier" in refusal(lambda: made.tell("a", media="ram"))


def test_settings_change_one_by_one_and_survive(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.namespace("a", quota_hard="1M")
        made.tell("a", ttl="1h")
        made.tell(".", weight="5")
        made.restart()
        trio.run(made.census)
        assert made.lifecycle.settings(made.find(b"a")) == Settings(quota_hard=MIB, ttl=3600)
        assert made.ledger.namespaces.default.settings == Settings(weight=5)
        assert made.ledger.namespaces.name(made.find(b"a").ino) == "a"
        assert made.ledger.namespaces.name(ROOT_INO) == "."
        assert made.ledger.namespaces.name(4711) == ""


def test_a_directory_that_is_told_something_becomes_one(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        ino = made.mkdir(b"a").ino
        made.tell("a", ttl="1h")
        assert made.ledger.namespaces.own(ino)
        made.check()


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        (
            "a",
            "2",
            (
                "setting version=2: expected at least 3, what it has: entries of an earlier "
                "version do not come back"
            ),
        ),
        (
            ".",
            "2",
            "setting version: the mount itself has none; its top-level directories have",
        ),
        ("a", "0", "setting version=0: expected a whole number from 1 to 2147483648"),
    ],
)
def test_versions_that_are_refused(tmp_path: Path, name: str, version: str, said: str) -> None:
    with world(tmp_path) as made:
        made.namespace("a", version="3")
        assert refusal(lambda: made.tell(name, version=version)) == said
        made.tell("a", version="3", pin="on")
        assert not made.ledger.namespaces.dropped, "it is that version already"


def test_quotas_in_which_no_object_fits_are_refused(tmp_path: Path) -> None:
    """A namespace that has one, from an earlier version of kvfs, keeps it."""
    with world(tmp_path) as made:
        said = "setting quota_hard=4095: expected 0, or at least 4K, which each object takes"
        quota = {"quota_hard": "4095"}
        assert refusal(lambda: made.lifecycle.make("a", quota, uid=0, gid=0)) == said
        made.namespace("a")
        assert refusal(lambda: made.tell("a", **quota)) == said
        directory = made.find(b"a").ino
        with made.catalog.batch() as batch:
            made.ledger.namespaces.set(directory, Settings(quota_hard=1), batch)
        made.restart()
        space = made.tell("a", weight="7")
        assert (space.settings.quota_hard, space.settings.weight) == (1, 7)
        made.tell("a", quota_hard="4K")


def test_unreadable_settings_are_logged_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A namespace that only a newer kvfs understands stays one; so does one that is damaged."""
    with world(tmp_path) as made:
        inos = []
        for name, text in ((b"a", b'{"shape": "round"}'), (b"b", b"\xff"), (b"c", b"[]")):
            inos.append(made.mkdir(name).ino)
            with made.catalog.batch() as batch:
                batch.mark(b"n", inos[-1], text)
        made.restart()
        trio.run(made.census)
        for ino, called in zip(inos, "abc", strict=True):
            space = made.ledger.namespaces.own(ino)
            assert space is not None
            assert space.settings == Settings()
            assert f"{called!r} has the default settings" in caplog.text


# Switched and dropped


def test_a_greater_version_is_an_empty_directory_of_the_same_kind(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", quota_hard="1M", mode="0600")
        made.mkdir(b"a/d")
        await made.make_file(b"a/d/x", BYTES)
        old = made.attributes.change(made.find(b"a").ino, mode=0o1777, uid=5)
        made.attributes.set_xattr(old.ino, b"user.mine", b"kept")
        inner = made.at(b"a/d")
        fresh = made.tell("a", version="2")
        new = made.find(b"a")
        assert new.ino == fresh.ino != old.ino
        assert (new.mode, new.uid, new.nlink) == (old.mode, 5, 2)
        assert made.attributes.xattr(new.ino, b"user.mine") == b"kept"
        assert fresh.settings == Settings(quota_hard=MIB, mode=0o600, version=2)
        assert made.tree.list_entries(new.ino, 2, 10).entries == []
        assert (ROOT_INO, b"a", old.ino) in made.gone, "the kernel is told"
        for missing in (
            lambda: made.tree.lookup(inner.ino, b"x"),
            lambda: made.tree.lookup(old.ino, b"d"),
            lambda: made.tree.check_new(inner.ino, b"y"),
            lambda: made.tree.make(inner.ino, b"y", stat.S_IFDIR, 0, 0),
        ):
            refusal(missing, NotFoundError)
        assert made.tree.list_entries(inner.ino, 0, 10).entries == []
        assert made.tree.inode(ROOT_INO).nlink == 3
        made.check()
        await made.walk()
        assert made.nvme is not None
        assert sum(tier.objects for tier in made.tiers) == 0
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_dropped_namespace_is_gone_at_once_and_its_name_is_free(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", quota_hard="1M")
        await made.make_file(b"a/x", BYTES)
        made.drop("a")
        refusal(lambda: made.find(b"a"), NotFoundError)
        assert made.tree.inode(ROOT_INO).nlink == 2
        made.namespace("a")
        await made.make_file(b"a/x", BYTES)
        made.check()
        await made.walk()
        assert await made.read(made.at(b"a/x").ino) == BYTES
        await made.check_at_rest()
        assert made.ledger.accounts.objects == 1

    run(case, tmp_path)


@pytest.mark.parametrize("how", ["drop", "version"])
def test_a_directory_without_settings_goes_alike(tmp_path: Path, how: str) -> None:
    async def case(made: World) -> None:
        made.mkdir(b"a")
        made.mkdir(b"a/d")
        await made.make_file(b"a/d/x", BYTES)
        await made.store(b"other", BYTES)
        inner = made.at(b"a/d")
        if how == "drop":
            made.drop("a")
        else:
            made.tell("a", version="2")
        refusal(lambda: made.tree.lookup(inner.ino, b"x"), NotFoundError)
        made.check()
        await made.walk()
        assert made.ledger.accounts.objects == 1
        assert made.ledger.namespaces.default.objects == 1
        await made.check_at_rest()

    run(case, tmp_path)


def test_the_mount_itself_cannot_be_dropped(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        said = "the mount's own namespace cannot be dropped: unmount, or rm -r"
        assert refusal(lambda: made.drop(".")) == said


def test_rename_into_a_dropped_namespace_is_refused(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a")
        made.mkdir(b"a/d")
        made.mkdir(b"b")
        await made.store(b"x", BYTES)
        inner = made.at(b"a/d").ino
        made.drop("a")
        for name in (b"x", b"b"):
            refusal(partial(made.renames.rename, ROOT_INO, name, inner, b"y", 0), NotFoundError)
        refusal(lambda: made.tree.link(made.find(b"x").ino, inner, b"y"), NotFoundError)
        await made.walk()
        assert await made.read(made.find(b"x").ino) == BYTES
        await made.check_at_rest()

    run(case, tmp_path)


# Attributes


def test_attributes_are_settings(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        lifecycle = made.lifecycle
        inode = made.mkdir(b"a")
        assert lifecycle.attributes(inode) == []
        assert lifecycle.attribute(inode, b"user.kvfs.ttl") == b"0"
        lifecycle.set_attribute(inode, b"user.kvfs.ttl", b"1h")
        lifecycle.set_attribute(made.tree.inode(inode.ino), b"user.kvfs.weight", b"3\0")
        inode = made.tree.inode(inode.ino)
        assert lifecycle.attribute(inode, b"user.kvfs.ttl") == b"1h"
        assert lifecycle.attribute(inode, b"user.kvfs.nonsense") is None
        assert lifecycle.attribute(inode, b"user.kvfs.\xff") is None
        assert lifecycle.attributes(inode) == [b"user.kvfs.ttl", b"user.kvfs.weight"]
        lifecycle.reset_attribute(inode, b"user.kvfs.ttl")
        assert lifecycle.attributes(inode) == [b"user.kvfs.weight"]
        assert made.mkdir(b"a/b").namespace == inode.ino
        assert lifecycle.attribute(made.at(b"a/b"), b"user.kvfs.weight") == b"3", "what it is in"
        lifecycle.set_attribute(made.tree.inode(ROOT_INO), b"user.kvfs.ttl", b"2h")
        assert made.ledger.namespaces.default.settings.ttl == 7200


def test_attributes_that_are_refused(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        lifecycle = made.lifecycle
        top, nested = made.mkdir(b"a"), made.mkdir(b"a/b")
        file = await made.store(b"f", BYTES)
        where = (
            "attribute user.kvfs.ttl: expected on the mount point or on a top-level directory, "
            "which are namespaces"
        )
        for inode in (nested, file):
            call = partial(lifecycle.set_attribute, inode, b"user.kvfs.ttl", b"1h")
            assert refusal(call) == where
        for name, value, said in (
            (b"ttl", b"soon", "setting ttl=soon: expected a duration such as"),
            (b"ttll", b"1", "unknown setting 'ttll'; did you mean ttl?"),
            (b"pin", b"\xff", "setting pin=\ufffd: expected "),
        ):
            call = partial(lifecycle.set_attribute, top, b"user.kvfs." + name, value)
            assert refusal(call).startswith(said)
        said = refusal(lambda: lifecycle.reset_attribute(top, b"user.kvfs.ttl"), NoAttributeError)
        assert said == "'a' has no settings of its own"
        assert not made.ledger.namespaces.own(top.ino)
        made.tell("a", version="2")
        top = made.find(b"a")
        for name in (b"version", b"nonsense"):
            call = partial(lifecycle.reset_attribute, top, b"user.kvfs." + name)
            assert refusal(call) == (f"setting {name.decode()}: kvfs has no default for it")
        await made.walk()

    run(case, tmp_path)


# Overrides


def test_settings_give_owner_and_mode_of_new_files(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a", uid="7", gid="8", mode="0640")
        made.mkdir(b"a/d")
        file = await made.make_file(b"a/d/x", BYTES)
        assert (file.uid, file.gid, file.mode) == (7, 8, stat.S_IFREG | 0o640)
        directory = made.at(b"a/d")
        assert (directory.uid, directory.mode) == (0, stat.S_IFDIR | 0o755), "whoever made it"
        made.tell("a", uid="", mode="")
        file = await made.make_file(b"a/y", BYTES)
        assert (file.uid, file.gid, file.mode) == (0, 8, stat.S_IFREG | 0o644)
        made.check()

    run(case, tmp_path)


def test_the_mounts_own_quota_is_not_that_of_others(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        made.namespace("a")
        made.tell(".", quota_objects="1", eviction="never")
        await made.store(b"x", BYTES)
        await made.make_file(b"a/x", BYTES)
        await made.make_file(b"a/y", BYTES)
        with pytest.raises(QuotaError) as refused:
            await made.store(b"y", BYTES)
        assert str(refused.value) == (
            "namespace . has 1 objects of 12.0 KiB, its quota is 1 objects, and nothing more may "
            "be dropped"
        )
        made.check()

    run(case, tmp_path)
