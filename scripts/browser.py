"""A real Chromium without a screen, for the tests of the page and for its pictures.

Contract: `chromium` gives a driver of a window of that size, and ends both processes. `requests`
has the requests of its pages, and `errors` their errors. scripts/install.sh test installs Debian's
chromium and chromium-driver.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

DRIVER = "/usr/bin/chromedriver"
BROWSER = "/usr/bin/chromium"


@contextmanager
def chromium(width: int, height: int, *, dark: bool = False) -> Iterator[webdriver.Chrome]:
    """A phone's window is 360 wide, which no real window can be: it is emulated."""
    options = Options()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # it leaves much there
        service = Service(DRIVER, env=os.environ | {"TMPDIR": folder})
        with _ended(webdriver.Chrome(options=options, service=service)) as driver:
            narrow = width < 600  # noqa: PLR2004
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": narrow}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver


@contextmanager
def _ended(driver: webdriver.Chrome) -> Iterator[webdriver.Chrome]:
    try:
        yield driver
    finally:
        driver.quit()


def errors(driver: webdriver.Chrome) -> list[str]:
    """Return all messages of the console since the last call, of any kind."""
    return [entry["message"] for entry in _log(driver, "browser")]


def requests(driver: webdriver.Chrome) -> set[str]:
    """Return the origins of all requests since the last call."""
    found = set()
    for entry in _log(driver, "performance"):
        message: dict[str, Any] = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = urlsplit(message["params"]["request"]["url"])
            found.add(f"{url.scheme}://{url.netloc}")
    return found


def _log(driver: webdriver.Chrome, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = driver.get_log(kind)  # type: ignore[no-untyped-call]
    return found
