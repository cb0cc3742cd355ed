"""Options that change while mounted: each has an observer, and each value reaches it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

import kvfs
from kvfs.config import Config
from kvfs.daemon import bucket
from kvfs.errors import ConfigError
from kvfs.live import HOT, LiveConfig
from tests.unit.world import World

KV = Path("/mnt/kv")


@pytest.fixture
def live(tmp_path: Path) -> LiveConfig:
    return LiveConfig(Config(mountpoint=KV), tmp_path / "config")


def observed() -> Iterator[str]:
    """The options that a module of kvfs observes."""
    for path in Path(kvfs.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and re.fullmatch(r"(self\.)?live\.observe(_first)?", ast.unparse(node.func))
            ):
                names = node.args if node.func.attr == "observe_first" else node.args[:1]
                yield from map(ast.literal_eval, names)


def test_every_hot_option_has_an_observer_and_every_observer_an_option() -> None:
    assert set(observed()) == HOT


def test_an_observer_of_no_hot_option_is_a_defect(live: LiveConfig) -> None:
    for name in ("frobnicate", "ram"):
        with pytest.raises(AssertionError, match=name):
            live.observe(name, print)


def test_an_observer_gets_the_first_value_and_each_change_of_its_option(live: LiveConfig) -> None:
    seen: list[int] = []
    live.observe("promote_after", seen.append)
    trio.run(live.change, {"promote_after": "7", "reclaimable": "50"})
    trio.run(live.change, {"reclaimable": "60"})
    assert seen == [2, 7]
    assert Config.from_json(live._file.read_text()) == live.config
    assert (live.config.promote_after, live.config.reclaimable) == (7, 60)


@pytest.mark.parametrize("name", ["ram", "reclaimable", "access_log", "file"])
def test_a_refused_change_changes_nothing(live: LiveConfig, name: str, tmp_path: Path) -> None:
    seen: list[int] = []
    tried: list[Config] = []

    async def refuse(config: Config) -> None:
        tried.append(config)
        raise ConfigError("no")

    live.observe("promote_after", seen.append)
    live.observe_first("access_log", "access_log_size", trial=refuse)
    before = live.config
    texts = {"promote_after": "7", name: "/x"}
    if name == "file":
        texts = {"promote_after": "7", "access_log_size": "1M"}
        live._file = tmp_path / "none" / "config"
    with pytest.raises((ConfigError, FileNotFoundError)):
        trio.run(live.change, texts)
    assert live.config == before
    assert seen == [2]
    assert not live._file.exists()
    assert len(tried) == (name == "access_log")


def test_two_changes_at_once_both_hold(live: LiveConfig) -> None:
    looked_at = trio.Event()

    async def wait(_: Config) -> None:
        await looked_at.wait()

    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live.change, {"access_log": "/x"})
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(live.change, {"promote_after": "7"})
            await trio.testing.wait_all_tasks_blocked()
            looked_at.set()

    live.observe_first("access_log", "access_log_size", trial=wait)
    trio.run(both)
    assert (live.config.access_log, live.config.promote_after) == (Path("/x"), 7)


def test_values_reach_the_parts_of_the_dispatcher(tmp_path: Path) -> None:
    made = World(tmp_path)
    parts = made.dispatcher

    def values() -> tuple[float, ...]:
        return (
            *(parts.promotion.after, parts.demotion.reclaimable, parts.admission.budget),
            *(parts.scrub.period, made.ledger.verified.after),
        )

    assert values() == (2, 25, 0, 0, 86400)
    texts = {"promote_after": "3", "reclaimable": "50", "nvme_writes": "1G", "scrub": "1d"}
    trio.run(made.live.change, texts | {"verify_after": "1h"})
    assert values() == (3, 50, 1 << 30, 86400, 3600)
    made.end()


@pytest.mark.parametrize("exclusive", ["on", "off"])
def test_values_reach_the_bucket(tmp_path: Path, exclusive: str) -> None:
    config = Config.from_options(KV, f"s3=s3://bucket/p,s3_delay=1,s3_exclusive={exclusive}")
    live = LiveConfig(config, tmp_path / "config")
    made = bucket.prepare(live, tmp_path, takeover=True)
    assert made is not None
    shared = exclusive == "off"
    assert (made.delay, made.wait, made.recheck) == (1.0, 30.0, 30.0)
    assert (made.stream, made.shared) == (256 << 20, shared)
    texts = {"s3_delay": "2", "s3_wait": "3", "s3_recheck": "4", "s3_stream": "5"}
    trio.run(live.change, texts | {"s3_shared": "on"})
    assert (made.delay, made.wait, made.recheck, made.stream, made.shared) == (2, 3, 4, 5, shared)
    trio.run(live.change, {"s3_shared": "off"})
    assert not made.shared
