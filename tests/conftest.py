"""The fixtures that all tests share."""

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest

from kvfs import runtime
from scripts.s3_server import Server
from tests.harness import Mounted

Mount = Callable[..., Mounted]
# A worker takes whole files: those that take minutes come first, or one works alone at the end.
LONG = (
    "tests/s3/test_outage.py",
    "tests/connectors/test_lmcache.py",
    "tests/faults/test_takeover.py",
    "tests/docs/test_commands.py",
    "tests/connectors/test_native.py",
    "tests/s3/test_two_nodes.py",
    "tests/s3/test_faulty_store.py",
    "tests/s3/test_stream.py",
    "tests/connectors/test_vllm.py",
    "tests/mount/test_page.py",
    "tests/s3/test_mounted.py",
    "tests/faults/test_crash.py",
    "tests/s3/test_gc.py",
    "tests/semantics/test_life.py",
    "tests/unit/test_bucket_walks.py",
    "tests/unit/test_accounts.py",
    "tests/connectors/test_namespaces.py",
)
USUAL = "ram=256M,nvme={tmp}/nvme,nvme_size=2G"
_NUMBERS = itertools.count(1)
_CREDENTIALS: dict[str, str] = {}  # of the server of `s3`, once it runs

# Shells have what they run in the background ignore it, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files of LONG first, then those with many tests; keep the order within a file."""
    files = Counter(_file(item) for item in items)
    order = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: (order.get(_file(item), len(LONG)), -files[_file(item)]))


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Expect that a file of tests leaves the environment as it was, apart from `s3`."""
    before = _variables()
    yield
    assert _variables() == before | _CREDENTIALS, "use monkeypatch, or pytest.MonkeyPatch.context"


def _variables() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """`mount(options, name="kv")` mounts kvfs below tmp_path; `{tmp}` in options is tmp_path."""
    with _mounts(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def module_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """The same for all tests of a file; no test changes another test's files."""
    with _mounts(tmp_path_factory.mktemp("module")) as make:
        yield make


@pytest.fixture(scope="module")
def _kept() -> dict[str, Mounted]:
    """The mounts of `emptied`, by their options."""
    return {}


@pytest.fixture
def emptied(module_mount: Mount, _kept: dict[str, Mounted]) -> Iterator[Mount]:
    """`emptied(options)`: one mount for the tests of a file, each of which finds it empty.

    A test may have its daemon die; settings of the mount itself would stay.
    """
    used: dict[str, Mounted] = {}

    def take(options: str) -> Mounted:
        # It is kept again if it can be emptied, else it is for no other test.
        used[options] = _kept.pop(options) if options in _kept else make(options)
        return used[options]

    def make(options: str) -> Mounted:
        name = f"kv{next(_NUMBERS)}"
        return module_mount(options.replace("{tmp}/", f"{{tmp}}/{name}-"), name)

    yield take
    for one in used.values():
        one.empty()
    _kept.update(used)


@contextmanager
def _mounts(folder: Path) -> Iterator[Mount]:
    mounted: list[Mounted] = []

    def make(options: str, name: str = "kv") -> Mounted:
        path = folder / name
        path.mkdir()
        one = Mounted(path, options.replace("{tmp}", str(folder)), folder / f"{name}.log")
        mounted.append(one)
        one.mount()
        return one

    with _all_cleaned(mounted):
        yield make
        for one in mounted:
            if runtime.mount_at(one.path) is not None:
                one.check_gauges()
                one.check_accounts()
                one.umount("--now")
            one.check_log()


@contextmanager
def _all_cleaned(mounted: list[Mounted]) -> Iterator[None]:
    try:
        yield
    finally:
        for one in mounted:
            one.clean_up()


@pytest.fixture
def kv(mount: Mount) -> Mounted:
    """The usual mount: RAM and NVMe, with everything on."""
    return mount(USUAL)


@pytest.fixture(params=["passthrough=auto", "passthrough=off"])
def either(request: pytest.FixtureRequest, mount: Mount) -> Mounted:
    """The usual mount, with the kernel reading and writing bytes, and again with the daemon."""
    return mount(f"{USUAL},{request.param}")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for a whole run. Its credentials are in the environment, as users give them."""
    server = Server(tmp_path_factory.mktemp("s3") / "server")
    before = dict(os.environ)
    try:
        server.start()
        _CREDENTIALS.update(server.credentials)
        os.environ.update(_CREDENTIALS)
        yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.wipe()


@pytest.fixture
def bucket(s3: Server) -> str:
    """A new bucket."""
    name = f"kvfs-test-{next(_NUMBERS)}"
    make_bucket(s3, name)
    return name


def make_bucket(s3: Server, name: str) -> None:
    session = boto3.session.Session()  # the default one keeps the credentials of another server
    session.client("s3", endpoint_url=s3.endpoint).create_bucket(Bucket=name)
