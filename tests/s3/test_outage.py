"""A real store that hangs, dies and comes back below a real mount in constant use."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest

from scripts.s3_server import Server
from tests.conftest import Mount, make_bucket
from tests.harness import Mounted, wait_for
from tests.s3.rig import bytes_in, narrow, says_no_secret, send_away
from tests.s3.test_mounted import Make, all_uploaded, attribute, s3_of, unfinished

MIB = 1 << 20
_dice = random.Random(23)
SMALL, OTHER = _dice.randbytes(100_000), _dice.randbytes(100_000)
LARGE = _dice.randbytes(72 * MIB)
_NUMBERS = count(1)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of this test alone, which stops and kills it."""
    server = Server(tmp_path_factory.mktemp("own") / "server")
    try:
        server.start()
        yield server
    finally:
        server.wipe()


@pytest.fixture
def own(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name, value in own_server.credentials.items():
        monkeypatch.setenv(name, value)
    own_server.start()  # what the last test has killed
    return own_server


@pytest.fixture
def own_bucket(own: Server) -> str:
    name = f"bucket-{next(_NUMBERS)}"
    make_bucket(own, name)
    return name


@pytest.fixture
def made(own: Server, own_bucket: str, mount: Mount) -> Iterator[Make]:
    mounted: list[Mounted] = []

    def make(options: str = "s3_wait=4", tiers: str = "ram=256M,nvme={tmp}/nvme") -> Mounted:
        kv = mount(
            f"{tiers},nvme_size=1G,log_level=debug,s3=s3://{own_bucket}/p,s3_delay=0.1,"
            f"s3_endpoint={own.endpoint},s3_region=us-east-1,{options}"
        )
        kv.allow_log("record is not in|s3 tier|is tried again|stays in the bucket|not aborted")
        kv.allow_log("a mover has no answer")
        mounted.append(kv)
        return kv

    try:
        yield make
        for kv in mounted:
            says_no_secret(kv, own.credentials["AWS_SECRET_ACCESS_KEY"])
    finally:
        own.start()


@contextmanager
def again_and_again(do: Callable[[int], None]) -> Iterator[list[float]]:
    """Call it in a thread, with 0, 1, 2... until the block ends; the seconds of each call.

    Exceptions of the calls are raised here.
    """
    seconds: list[float] = []
    problems: list[BaseException] = []
    end = threading.Event()

    def run() -> None:
        try:
            for number in count():
                began = time.monotonic()
                do(number)
                seconds.append(time.monotonic() - began)
                if end.wait(0.002):
                    return
        except BaseException as error:  # noqa: BLE001 (it is raised where the test waits)
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seconds
    finally:
        end.set()
        thread.join(60)
        if problems:  # a wait of the block may have timed out for that, and would be tried again
            raise problems[0]
    assert not thread.is_alive(), "it hangs"


def opens(path: Path, answers: list[tuple[float, bytes | None]]) -> threading.Thread:
    """A thread that opens and reads the file once, and takes the time."""

    def run() -> None:
        began = time.monotonic()
        try:
            found: bytes | None = path.read_bytes()
        except FileNotFoundError:
            found = None
        answers.append((time.monotonic() - began, found))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


WAIT = 4.0  # s, `s3_wait`
SLACK = 8.0  # s that a busy machine may add to it


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_local_objects_are_served_during_an_outage(
    made: Make, own: Server, own_bucket: str, how: str
) -> None:
    kv = made()
    away = narrow(kv, "n")
    contents = {f"gone{number}": SMALL + bytes([number]) for number in range(16)}
    send_away(away, contents)
    here = kv.path / "here"
    here.mkdir()
    for number in range(8):
        (here / f"r{number}").write_bytes(OTHER + bytes([number]))
    all_uploaded(kv)

    def read(number: int) -> None:
        assert (here / f"r{number % 8}").read_bytes() == OTHER + bytes([number % 8])

    written: dict[str, bytes] = {}
    (kv.path / "w").mkdir()

    def write(number: int) -> None:
        if number < 300:
            data = SMALL + number.to_bytes(4, "big")
            (kv.path / "w" / f"f{number}").write_bytes(data)
            written[f"@0/w/f{number}"] = data

    if how == "hangs":
        own.suspend()
    else:
        own.kill("rgw")
    answers: list[tuple[float, bytes | None]] = []
    with again_and_again(read) as reads, again_and_again(write) as writes:
        open_predictor = [opens(away / name, answers) for name in contents]
        for opener in open_predictor:
            opener.join(60)
        assert len(answers) == len(contents)
        wait_for(lambda: s3_of(kv)["state"] == "down", "it is found out")
        known = len(reads), len(writes)
        quick: list[tuple[float, bytes | None]] = []
        opens(away / "gone0", quick).join(60)
        wait_for(lambda: len(reads) > known[0] + 20 and len(writes) > known[1], "they go on")
        status = s3_of(kv)
        assert status["why"]
        assert status["dirty_objects"] > 0
        assert status["oldest_dirty_s"] > 0
        if how == "hangs":
            own.resume()
        else:
            own.start()
        all_uploaded(kv)
    assert {found for _, found in answers + quick} == {None}
    assert max(took for took, _ in answers) < WAIT + SLACK
    assert quick[0][0] < WAIT
    assert max(reads) < WAIT, "a read of what is here waits for no bucket"
    assert max(writes) < WAIT
    all_uploaded(kv)
    there = bytes_in(own, own_bucket)
    assert {key: there[key] for key in written} == written
    for name, data in contents.items():
        assert wait_for(lambda: read_or_none(away / name), f"{name} is back") == data  # noqa: B023 (it is called at once)
    wait_for(lambda: s3_of(kv)["state"] == "healthy", "it is well again")
    assert not s3_of(kv)["conflicts"]


def read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("arguments", [(), ("--now",)])
def test_an_unmount_does_not_wait_for_a_store_that_hangs(
    made: Make, own: Server, own_bucket: str, arguments: tuple[str, ...]
) -> None:
    # What is dirty is on NVMe by then, and goes up with the next mount.
    kv = made()
    away = narrow(kv, "n")
    send_away(away, {"gone": SMALL})
    all_uploaded(kv)
    own.suspend()
    try:
        answers: list[tuple[float, bytes | None]] = []
        opener = opens(away / "gone", answers)
        (kv.path / "dirty").write_bytes(OTHER)
        opener.join(60)
        assert [found for _, found in answers] == [None]
        kv.umount(*arguments)
    finally:
        own.resume()
    kv.mount()
    all_uploaded(kv)
    assert bytes_in(own, own_bucket)["@0/dirty"] == OTHER
    assert (kv.path / "dirty").read_bytes() == OTHER
    assert wait_for(lambda: read_or_none(away / "gone"), "it is back") == SMALL


def test_only_writers_wait_at_the_bound_of_dirty_bytes(made: Make, own: Server) -> None:
    kv = made("s3_wait=4,s3_dirty=1M")
    kv.expect_log(
        "1048576 bytes wait for their upload, the most that s3_dirty allows: writers wait"
    )
    (kv.path / "here").write_bytes(OTHER)
    (kv.path / "w").mkdir()
    all_uploaded(kv)
    own.kill("rgw")
    (kv.path / "w" / "first").write_bytes(SMALL)
    wait_for(lambda: s3_of(kv)["state"] == "down", "it is found out")
    written: dict[str, bytes] = {}

    def fill(name: str) -> None:
        for number in range(30):
            (kv.path / "w" / f"{name}{number}").write_bytes(SMALL)
            written[f"{name}{number}"] = SMALL

    def refused(name: str) -> float:
        began = time.monotonic()
        with pytest.raises(OSError, match="No space left") as problem:
            fill(name)
        assert problem.value.errno == errno.ENOSPC
        return time.monotonic() - began

    with again_and_again(lambda _: check(kv.path / "here", OTHER)) as reads:
        assert refused("a") > WAIT
        assert (len(written) + 1) * len(SMALL) >= MIB
        assert refused("b") < WAIT, "they have waited already"
    assert max(reads) < WAIT
    assert s3_of(kv)["waits"] >= 1
    for name, data in written.items():
        assert (kv.path / "w" / name).read_bytes() == data
    own.start()
    all_uploaded(kv)
    (kv.path / "w" / "more").write_bytes(SMALL)
    all_uploaded(kv)
    assert kv.log.read_text().count("the most that s3_dirty allows") == 1


def check(path: Path, data: bytes) -> None:
    assert path.read_bytes() == data


def has_part(server: Server, bucket: str) -> bool:
    """Whether a part of any upload has arrived."""
    client = boto3.session.Session().client("s3", endpoint_url=server.endpoint)
    for one in unfinished(server, bucket):
        try:
            parts = client.list_parts(Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])
        except (
            client.exceptions.NoSuchUpload,
            client.exceptions.NoSuchKey,
        ):  # it is complete by now
            continue
        if parts.get("Parts"):
            return True
    return False


def test_a_server_that_dies_in_the_middle_of_parts(
    made: Make, own: Server, own_bucket: str
) -> None:
    kv = made("s3_wait=30", tiers="ram=512M,nvme={tmp}/nvme")
    wanted = {f"@0/large{number}": LARGE + bytes([number]) for number in range(3)}
    for key, data in wanted.items():
        (kv.path / key.removeprefix("@0/")).write_bytes(data)
    for daemons in (("rgw",), ("rgw", "osd", "mon")):
        wait_for(lambda: has_part(own, own_bucket) or is_complete(kv), "a part is there")
        own.kill(*daemons)
        wait_for(lambda: s3_of(kv)["failures"] or s3_of(kv)["why"], "it is noticed")
        own.start()
        there = bytes_in(own, own_bucket)
        assert there.items() <= wanted.items(), there.keys()
    all_uploaded(kv)
    assert bytes_in(own, own_bucket) == wanted
    # An upload whose id was lost with the answer to its beginning stays until `kvfs gc` finds it
    # old enough. Nobody has sent it a part.
    wait_for(lambda: not has_part(own, own_bucket), "what was cut short is aborted")
    assert not list((kv.path.parent / "nvme" / "uploads").glob("*.json"))


def is_complete(kv: Mounted) -> bool:
    return s3_of(kv)["loaded"] and not s3_of(kv)["dirty_objects"]


SEED = int(os.environ.get("KVFS_SEED", "7"))


class Workload:
    """Writes, rewrites, renames, unlinks and reads in a namespace of which most is spilled.

    `contents` has the acknowledged bytes, by name.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.contents: dict[str, bytes] = {}
        self._dice = random.Random(SEED)
        self._names = count()
        print(f"seed {SEED}")

    def step(self, _: int = 0) -> None:
        dice, directory = self._dice, self.directory
        kind = dice.choices(("new", "again", "rename", "unlink", "read"), (5, 2, 2, 1, 3))[0]
        if kind == "new" or not self.contents:
            name = f"f{next(self._names)}"
        else:
            name = dice.choice(sorted(self.contents))
        path = directory / name
        if kind in {"new", "again"} or not self.contents:
            data = dice.randbytes(dice.randrange(1, 200_000))
            if self._written(path, data):
                self.contents[name] = data
        elif kind == "rename":
            fresh = f"f{next(self._names)}"
            path.rename(directory / fresh)
            self.contents[fresh] = self.contents.pop(name)
        elif kind == "unlink":
            path.unlink()
            del self.contents[name]
        else:
            found = read_or_none(path)
            assert found in {None, self.contents[name]}, name
            assert path.exists(), f"{name} has lost its name"

    def _written(self, path: Path, data: bytes) -> bool:
        """Write a file. While the store is down nothing leaves a namespace that is at its quota."""
        try:
            path.write_bytes(data)
        except OSError as error:
            if error.errno != errno.EDQUOT:
                raise
            return False
        return True

    def check(self) -> None:
        assert {path.name for path in self.directory.iterdir()} == self.contents.keys()
        for name, data in self.contents.items():
            found = wait_for(lambda: read_or_none(self.directory / name), f"{name} is read")  # noqa: B023 (it is called at once)
            assert found == data, name


def test_a_daemon_that_dies_in_the_middle_of_everything(
    made: Make, own: Server, own_bucket: str
) -> None:
    kv = made("s3_wait=20")
    work = Workload(narrow(kv, "n", objects=6))
    with again_and_again(work.step) as steps:
        for goal in (30, 60, 90):
            wait_for(lambda: len(steps) >= goal, f"{goal} steps")  # noqa: B023 (it is called at once)
            kv.kill_daemon()
    _all_is_there(kv, work, own, own_bucket)


def test_a_mount_that_dies_in_the_middle_of_everything(
    made: Make, own: Server, own_bucket: str
) -> None:
    kv = made("s3_wait=20")
    kv.allow_log("did not end properly: its bytes are all there")
    work = Workload(narrow(kv, "n", objects=6))
    for _ in range(2):
        for _ in range(40):
            work.step()
        kv.kill()
        kv.mount()
    _all_is_there(kv, work, own, own_bucket)


def test_a_store_that_dies_in_the_middle_of_everything(
    made: Make, own: Server, own_bucket: str
) -> None:
    kv = made("s3_wait=20")
    work = Workload(narrow(kv, "n", objects=20))
    with again_and_again(work.step) as steps:
        for goal in (30, 60):
            wait_for(lambda: len(steps) >= goal, f"{goal} steps")  # noqa: B023 (it is called at once)
            own.kill("rgw")
            own.start()
    _all_is_there(kv, work, own, own_bucket)


def _all_is_there(kv: Mounted, work: Workload, own: Server, bucket: str) -> None:
    """Check that no acknowledged file is lost, and no garbage stays in the bucket."""
    work.check()
    all_uploaded(kv)
    wait_for(lambda: not s3_of(kv)["to_delete"], "all is deleted")
    wanted = {f"n@1/{name}": data for name, data in work.contents.items()}
    there = bytes_in(own, bucket)
    assert there.keys() == wanted.keys()
    assert there == wanted
    assert s3_of(kv)["downloads"] + s3_of(kv)["deletes"] + s3_of(kv)["copies"] > 0
    assert not unfinished(own, bucket)


def test_a_mount_without_its_bucket_comes_to_life(made: Make, own: Server, own_bucket: str) -> None:
    own.kill("rgw")
    kv = made("s3_required=off")
    kv.expect_log(
        f"mounted without the bucket s3://{own_bucket}/p/, until it answers: .*Connection"
    )
    status: dict[str, Any] = s3_of(kv)
    assert status["state"] == "down"
    assert "Connection" in status["why"]
    (kv.path / "early").write_bytes(SMALL)
    assert attribute(kv.path / "early", "dirty") == "1"
    own.start()
    all_uploaded(kv)
    assert bytes_in(own, own_bucket) == {"@0/early": SMALL}
    wait_for(lambda: s3_of(kv)["state"] == "healthy", "it is well")
    kv.kill_daemon()
    (kv.path / "late").write_bytes(OTHER)
    all_uploaded(kv)
    assert bytes_in(own, own_bucket) == {"@0/early": SMALL, "@0/late": OTHER}
