"""A trace played with real files: the same hits as the simulator's, and no wrong byte unseen."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvfs import mounts
from kvfs.cli import main
from kvfs.clock import Clock
from kvfs.errors import ConfigError
from kvfs.layouts import recognise
from kvfs.simulation import replay as module
from kvfs.simulation.pool import SEPARATE, Nodes
from kvfs.simulation.pool import simulate as simulate_nodes
from kvfs.simulation.replay import ReplayError, content, directory, name, replay
from kvfs.simulation.routing import route
from kvfs.simulation.sweep import simulate
from kvfs.simulation.trace import Hits, Prompt, Trace

SIZE = 4096
PROMPTS = [(1100, [1, 2, 3]), (1024, [1, 2]), (600, [4, 5]), (1100, [1, 2, 3]), (512, [1])]
FIRST = name(1, 0)


@pytest.fixture
def trace() -> Trace:
    return Trace((Prompt(1000.0 * at, *one) for at, one in enumerate(PROMPTS)), "example")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for three blocks."""
    path = tmp_path / "disk"
    path.mkdir()
    mounts.mount("test", path, "tmpfs", 0, f"size={3 * SIZE}")
    try:
        yield path
    finally:
        mounts.umount(path, mounts.MNT_DETACH)


def test_without_a_limit_it_is_the_cache_for_everything(tmp_path: Path, trace: Trace) -> None:
    played = replay(trace, [tmp_path], SIZE)
    assert played.hits == simulate(trace, "lru", trace.unique)
    assert (played.stored, played.refused) == (5, 0)
    expected = {name(1, 0): 1, name(2, 1): 2, name(3, 2): 3, name(4, 0): 4, name(5, 4): 5}
    found = {f"{one.parent.name}/{one.name}": one.read_bytes() for one in tmp_path.glob("*/*")}
    assert found == {file: content(key, SIZE) for file, key in expected.items()}


def test_a_full_disk_is_a_cache_that_drops_nothing(small_disk: Path, trace: Trace) -> None:
    played = replay(trace, [small_disk], SIZE)
    assert played.hits == simulate(trace, "never", 3)
    assert (played.stored, played.refused) == (3, 2)
    assert len(list(small_disk.glob("*/*"))) == 3, "nothing half-written is left"


def test_several_directories_are_separate_caches(tmp_path: Path, trace: Trace) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    played = replay(trace, folders, SIZE, routes=route(trace, "random", 2, 3))
    assert played.hits == simulate_nodes(trace, "lru", 99, Nodes(2, "random", 3, SEPARATE))
    assert played.stored == played.hits.objects - played.hits.object_hits
    assert all(list(folder.glob("*/*")) for folder in folders)


def test_names_are_prefix_paths() -> None:
    nothing = "0000000000000000"
    assert name(0x1F, 0) == f"{nothing}{nothing}/000000000000001f{nothing}"
    assert name((1 << 63) - 1, 2) == f"0000000000000002{nothing}/7fffffffffffffff{nothing}"
    *above, last = os.fsencode(name(2, 1)).split(b"/")
    found = recognise(tuple(above), last)
    assert found
    assert (found.layout, found.key, found.parent_key) == ("kvfs-prefix", 2, 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (content(1, SIZE)[:-1], "has 4095 bytes, expected 4096"),
        (content(1, SIZE + 1), "has 4097 bytes or more, expected 4096"),
        (content(1, SIZE)[:-1] + bytes([content(1, SIZE)[-1] ^ 1]), "wrong bytes from offset 4095"),
        (content(2, SIZE), "wrong bytes from offset 0"),
        (b"", "has 0 bytes"),
    ],
)
def test_a_wrong_byte_ends_it(tmp_path: Path, trace: Trace, data: bytes, words: str) -> None:
    (tmp_path / FIRST).parent.mkdir()
    (tmp_path / FIRST).write_bytes(data)
    with pytest.raises(ReplayError, match=words) as raised:
        replay(trace, [tmp_path], SIZE)
    assert str(raised.value).startswith(str(tmp_path / FIRST))


def test_an_error_of_the_file_system_ends_it(tmp_path: Path, trace: Trace) -> None:
    (tmp_path / FIRST).mkdir(parents=True)
    with pytest.raises(ReplayError, match="Is a directory"):
        replay(trace, [tmp_path], SIZE)
    with pytest.raises(ReplayError, match="No such file or directory"):
        replay(trace, [tmp_path / "none"], SIZE)


def test_the_pace_of_the_trace(tmp_path: Path, trace: Trace) -> None:
    now, slept = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    clock = Clock(lambda: now[0], sleep)
    played = replay(trace, [tmp_path], SIZE, speed=2.0, clock=clock)
    assert slept == [0.0, 0.5, 0.5, 0.5, 0.5]
    assert played.seconds == 2.0


def test_a_directory_of_its_own_is_gone_afterwards(tmp_path: Path, trace: Trace) -> None:
    with directory(tmp_path, "mine", keep=False) as path:
        replay(trace, [path], SIZE)
        (path / FIRST).unlink()  # as if it was dropped
        (path / f"{FIRST}.part.tmp").touch()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_that_was_there_stays(tmp_path: Path, trace: Trace) -> None:
    (tmp_path / "quota").mkdir()
    with directory(tmp_path, "quota", keep=False) as path:
        replay(trace, [path], SIZE)
    assert list(tmp_path.rglob("*")) == [tmp_path / "quota"]


def test_replay_keeps_files_of_others(tmp_path: Path) -> None:
    with (
        pytest.raises(ReplayError, match="could not be removed: Directory not empty"),
        directory(tmp_path, "mine", keep=False) as path,
    ):
        (path / "precious.kv").touch()
    assert (tmp_path / "mine" / "precious.kv").exists()


def test_replay_error_comes_before_a_failed_removal(tmp_path: Path) -> None:
    path = tmp_path / "mine"

    def wrong() -> None:
        with directory(tmp_path, "mine", keep=False):
            (path / "precious.kv").touch()
            raise ReplayError("wrong bytes")

    with pytest.raises(ReplayError, match="wrong bytes") as raised:
        wrong()
    assert raised.value.__notes__ == [f"{path} could not be removed: Directory not empty"]


def test_a_directory_that_was_dropped_meanwhile_is_removed(tmp_path: Path) -> None:
    with directory(tmp_path, "mine", keep=False) as path:
        path.rmdir()

    def dropped() -> None:
        with directory(tmp_path, "mine", keep=False) as path:
            path.rmdir()
            replay([Prompt(0.0, 512, [1])], [path], SIZE)

    with pytest.raises(ReplayError, match="No such file or directory") as raised:
        dropped()
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("namespace", ["", ".", "..", "a/b", "a\0b"])
def test_a_namespace_is_one_name(tmp_path: Path, namespace: str) -> None:
    with (
        pytest.raises(ConfigError, match="expected the name of one directory"),
        directory(tmp_path, namespace, keep=False),
    ):
        pytest.fail("it was taken")


# the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": ids}
        for tokens, ids in PROMPTS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def kvfs(*arguments: str | Path) -> Result:
    texts = ["replay", *map(str, arguments)]
    return CliRunner().invoke(main, texts, prog_name="kvfs")


def test_json(file: Path, root: Path) -> None:
    result = kvfs(file, root, "--namespace", "a", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.pop("seconds") >= 0
    hits = Hits(4336, 2636, 11, 6)
    assert found == {
        "namespace": "a",
        "requests": 5,
        "tokens": 4336,
        "objects": 11,
        "token_hit_ratio": hits.token_ratio,
        "object_hit_ratio": hits.object_ratio,
        "stored": 5,
        "refused": 0,
    }
    assert list(root.iterdir()) == []


def test_the_first_requests_only_and_files_that_stay(file: Path, root: Path) -> None:
    result = kvfs(file, root, "--limit", "2", "--keep", "--namespace", "a", "--block-size", "8K")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].startswith("2 requests, 2124 tokens, 5 blocks looked up")
    assert result.stdout.splitlines()[1] == "tokens hit 48.21 %, objects hit 40.00 %"
    assert f"note: {root} is not a mount point of kvfs" in result.stderr
    assert {path.stat().st_size for path in (root / "a").glob("*/*")} == {8192}
    again = kvfs(file, root, "--namespace", "a")
    assert again.exit_code == 2
    assert "a is not empty" in again.stderr


def test_blocks_of_fewer_tokens(tmp_path: Path, root: Path) -> None:
    path = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": ids}
        for tokens, ids in [(150, [1, 2]), (130, [1, 2, 3])]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = kvfs(path, root, "--block-tokens", "64", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["tokens"], found["objects"], found["stored"]) == (280, 5, 3)
    assert found["token_hit_ratio"] == 128 / 280


def test_several_mount_points(file: Path, trace: Trace, root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    result = kvfs(file, root, other, "--routing", "random", "--seed", "3", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    expected = simulate_nodes(trace, "lru", 99, Nodes(2, "random", 3, SEPARATE))
    assert found["token_hit_ratio"] == expected.token_ratio
    assert found["object_hit_ratio"] == expected.object_ratio
    assert (found["nodes"], found["routing"], found["seed"]) == (2, "random", 3)
    assert [list(one.iterdir()) for one in (root, other)] == [[], []]
    shown = kvfs(file, root, other)
    assert shown.stdout.splitlines()[-1] == "2 nodes, random routing, seed 1"
    assert f"note: {other} is not a mount point of kvfs" in shown.stderr


def test_a_directory_without_a_name_of_the_users(file: Path, root: Path) -> None:
    result = kvfs(file, root, "--json", "--keep")
    assert [path.name for path in root.iterdir()] == [json.loads(result.stdout)["namespace"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{file}"], "Missing argument"),
        (["{file}", "{root}", "--block-size", "4095"], "block size 4095: expected 4096 bytes"),
        (["{file}", "{root}", "--block-size", "much"], "block size much: expected a size"),
        (["{file}", "{root}", "--block-tokens", "0"], "'--block-tokens': 0 is not in the range"),
        (["{file}", "{root}", "--block-tokens", "64"], "; --block-tokens 512 fits all lines"),
        (["{file}", "{root}", "--limit", "0"], "'--limit': 0 is not in the range"),
        (["{file}", "{root}", "--speed", "0"], "'--speed': 0.0 is not in the range"),
        (["{file}", "{root}", "--speed", "nan"], "'nan' is not a valid number: expected x>0"),
        (["{file}", "{file}"], "is not a directory"),
        (["{file}", "{root}", "{file}"], "is not a directory"),
        (["{file}", "{root}", "{root}/"], "is given twice: give each mount point once"),
        (["{file}", "{root}", "--routing", "foo"], "'--routing': 'foo' is not one of"),
        (["{file}", "{root}", "--routing", "random"], "expected several mount points"),
        (["{file}", "{root}", "--seed", "1"], "expected several mount points"),
        (["{root}/none", "{root}"], "none: cannot be read: No such file"),
        (["{file}", "{root}", "--namespace", "../up"], "expected the name of one directory"),
        (["{file}", "{root}", "--namespace", "x" * 300], "File name too long"),
    ],
)
def test_bad_input_is_one_line(file: Path, root: Path, arguments: list[str], words: str) -> None:
    result = kvfs(*(text.format(file=file, root=root) for text in arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("kvfs: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert list(root.iterdir()) == []


def test_wrong_bytes_are_one_line(file: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that gives back other bytes than were written, as far as this program sees."""
    calls = iter(range(1, 99))
    monkeypatch.setattr(module, "content", lambda _, size: bytes([next(calls)]) * size)
    result = kvfs(file, root)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"kvfs: {root}")
    assert "wrong bytes from offset 0" in result.stderr
    assert list(root.iterdir()) == []


def test_both_errors_are_one_line(file: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(part: Path, key: int, size: int) -> bool:
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(content(key + 1, size))
        (part.parent / "precious.kv").touch()
        return True

    monkeypatch.setattr(module, "_store", other)
    result = kvfs(file, root, "--namespace", "a")
    assert result.exit_code == 1
    path = root / "a"
    assert result.stderr == (
        f"kvfs: {path / name(2, 0)} has wrong bytes from offset 0; "
        f"{path} could not be removed: Directory not empty\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_one_leaves_nothing(
    file: Path, root: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    # It is ignored where the tests are a job in the background.
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(module, "_store", lambda *_: signal.raise_signal(number))
    try:
        result = kvfs(file, root, "--speed", "1")
    finally:
        signal.signal(signal.SIGINT, interrupts)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "kvfs: interrupted\n"
    assert list(root.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
