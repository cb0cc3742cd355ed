"""The fixtures that all tests share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfs import runtime
from tests.harness import Mounted

Mount = Callable[..., Mounted]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """`mount(options, name="kv")` mounts kvfs below tmp_path; `{tmp}` in options is tmp_path."""
    mounted: list[Mounted] = []

    def make(options: str, name: str = "kv") -> Mounted:
        path = tmp_path / name
        path.mkdir()
        one = Mounted(path, options.replace("{tmp}", str(tmp_path)), tmp_path / f"{name}.log")
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
    return mount("ram=256M,nvme={tmp}/nvme,nvme_size=2G")


@pytest.fixture(params=["passthrough=auto", "passthrough=off"])
def either(request: pytest.FixtureRequest, mount: Mount) -> Mounted:
    """The usual mount with the kernel moving the bytes, and again with the daemon doing it."""
    return mount(f"ram=256M,nvme={{tmp}}/nvme,nvme_size=2G,{request.param}")
