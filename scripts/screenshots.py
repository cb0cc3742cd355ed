"""The pictures of docs/seeing.md: the page on a desktop and on a phone, and `kvfs top`.

    .venv/bin/python -m scripts.screenshots [DIRECTORY]      docs/images, in about 90 s

Contract: of a real mount with some load, in a real browser (scripts/browser.py). Not a test: what
the page does is in tests/mount/test_page.py.
"""

import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import click
from rich.console import Console
from selenium.webdriver.common.by import By

from kvfs.cli.frame import View
from kvfs.cli.top import Poller
from kvfs.control import request
from scripts.bench.mounted import kvfs
from scripts.browser import chromium
from scripts.s3_server import Server

SECONDS = 80  # of load: 16 samples
PORT = 18195
MIB = 1 << 20
ENGINES = {"vllm-8b": 40, "sglang-70b": 24, "lmcache": 60}  # blocks that are in use
TOP_COLUMNS, TOP_ROWS = 130, 28
WINDOWS = {"page": (1100, 1150, False), "page-dark": (1100, 620, True), "phone": (360, 740, False)}


@contextmanager
def _load(mountpoint: Path) -> Iterator[None]:
    """Blocks that are written, and read again, the first ones most."""
    over = threading.Event()
    chance = random.Random(7)  # noqa: S311 (a picture that can be made again)

    def work() -> None:
        while not over.wait(0.02):
            name = chance.choice(list(ENGINES))
            block = int(chance.paretovariate(0.8)) % ENGINES[name]
            path = mountpoint / name / f"block-{block:03}"
            try:
                path.read_bytes()
            except FileNotFoundError:
                path.write_bytes(chance.randbytes(chance.randrange(1, 5) * MIB))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _pictures(mountpoint: Path, directory: Path) -> None:
    for name, (width, height, dark) in WINDOWS.items():
        with chromium(width, height, dark=dark) as driver:
            driver.get(f"http://127.0.0.1:{PORT}/")
            driver.implicitly_wait(30)
            driver.find_element(By.CSS_SELECTOR, "#charts path")
            driver.find_element(By.CSS_SELECTOR, "#objects td")
            driver.save_screenshot(str(directory / f"{name}.png"))
    poller = Poller(mountpoint, 2.0)
    poller.look()
    time.sleep(poller.interval)
    poller.look()
    console = Console(record=True, width=TOP_COLUMNS, file=StringIO(), force_terminal=True)
    console.print(poller.frame.render(View(), TOP_COLUMNS, TOP_ROWS))
    drawn = console.export_svg(title=f"kvfs top {mountpoint}")
    # Fonts of the machine where it is looked at, and nothing from elsewhere.
    drawn = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", drawn, flags=re.DOTALL)
    (directory / "top.svg").write_text(drawn)


@click.command
@click.argument("directory", type=click.Path(path_type=Path), default=Path("docs/images"))
def main(directory: Path) -> None:
    """Draw them."""
    with tempfile.TemporaryDirectory(prefix="kvfs-") as folder:
        store = Server(Path(folder, "s3"))
        try:
            store.start()
            os.environ.update(store.credentials)
            boto3.client("s3", endpoint_url=store.endpoint).create_bucket(Bucket="my-bucket")
            options = (
                f"ram=96M,nvme={folder}/nvme,nvme_size=160M,web={PORT},log={folder}/log,"
                f"s3=s3://my-bucket/kv,s3_endpoint={store.endpoint},s3_delay=3"
            )
            _draw(Path(folder, "kv"), options, directory)
        finally:
            store.wipe()


def _draw(mountpoint: Path, options: str, directory: Path) -> None:
    with kvfs(mountpoint, options) as mounted:
        for name in ENGINES:
            request(mountpoint, "ns_create", name=name, settings={}, uid=0, gid=0)
        with _load(mounted.path):
            time.sleep(SECONDS)
            _pictures(mounted.path, directory)


if __name__ == "__main__":
    main()
