"""The page of a real mount, in a real browser."""

import os
import signal
import socket
import stat
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

from kvfs.control import request
from scripts.browser import chromium, errors, requests
from tests.conftest import Mount
from tests.harness import PATIENCE, Mounted, wait_for
from tests.mount.test_metrics import free_port

HOSTILE = b"<script>alert(1)<img src=x onerror=alert(2)>&\"'\xff\n"  # a name may have any bytes
SEEN = "<script>alert(1)<img src=x onerror=alert(2)>&\"'\\xff\\x0a"


@pytest.fixture
def port() -> int:
    return free_port()


def text(driver: webdriver.Chrome, selector: str) -> str:
    """The visible text there; "" while it is drawn again."""
    try:
        found = driver.find_elements(By.CSS_SELECTOR, selector)
        return "\n".join(one.text for one in found)
    except StaleElementReferenceException:
        return ""


def shows(driver: webdriver.Chrome, selector: str, what: str) -> None:
    try:
        wait_for(lambda: what in text(driver, selector), f"{what!r} in {selector}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {text(driver, 'body')}") from error


def press(driver: webdriver.Chrome, selector: str, name: str) -> None:
    """Press the button with this text, in one step, because tables are drawn again."""
    script = """
    const [selector, name] = arguments;
    const found = [...document.querySelectorAll(selector)].find((one) => one.textContent === name);
    if (found) found.click();
    return Boolean(found);
    """
    wait_for(lambda: driver.execute_script(script, selector, name), f"{name} in {selector}")


def points(driver: webdriver.Chrome) -> bool:
    """Whether a chart has a line with a point."""
    script = (
        "return [...document.querySelectorAll('#charts path')]"
        ".some((path) => path.getAttribute('d').includes('L'))"
    )
    return bool(driver.execute_script(script))


def fill(kv: Mounted) -> None:
    request(kv.path, "ns_create", name="engine", settings={}, uid=0, gid=0)
    (kv.path / "engine" / "block").write_bytes(b"a" * 100_000)
    hostile = os.path.join(os.fsencode(kv.path), b"engine", HOSTILE)
    with open(hostile, "wb") as file:
        file.write(b"b" * 200_000)
    kv.idle()  # an open of a file that still has its writer is no hit
    for path in (os.fsencode(kv.path / "engine" / "block"), hostile):
        assert Path(os.fsdecode(path)).read_bytes()


def test_the_page_shows_a_mount_in_a_browser(mount: Mount, port: int) -> None:
    kv = mount(f"ram=64M,nvme={{tmp}}/nvme,nvme_size=1G,web={port}")
    fill(kv)
    with chromium(1280, 900) as driver:
        driver.get(f"http://localhost:{port}/")
        shows(driver, "#mountpoint", str(kv.path))
        shows(driver, "#tiers", "64.0 MiB")
        wait_for(lambda: points(driver), "charts have lines")
        shows(driver, "#spaces", "engine")
        shows(driver, "#objects", "engine/block")
        shows(driver, "#objects", SEEN)
        assert not driver.execute_script(
            "return document.querySelectorAll('td script, td img').length"
        )

        # One object's life, by its path, as it is written on the machine.
        driver.find_element(By.ID, "path").send_keys(str(kv.path / "engine" / "block"))
        driver.find_element(By.CSS_SELECTOR, "#ask button").click()
        shows(driver, "#life", "100000 bytes")
        shows(driver, "#life", "sealed, version 1")
        # And that of a name which no keyboard has.
        press(driver, "#objects button", f"engine/{SEEN}")
        shows(driver, "#life", "200000 bytes")
        shows(driver, "#life", SEEN)
        on_screen = (
            "const box = document.getElementById('life').getBoundingClientRect();"
            "return box.top >= 0 && box.top < window.innerHeight"
        )
        wait_for(lambda: driver.execute_script(on_screen), "the click shows what it has changed")

        Select(driver.find_element(By.ID, "sort")).select_by_value("name")
        press(driver, "#spaces button", "engine")
        wait_for(lambda: text(driver, "#space-charts").count("now") >= 3, "charts of a namespace")
        driver.find_element(By.CSS_SELECTOR, "[data-order=large]").click()
        shows(driver, "#objects-age", "ago")
        assert errors(driver) == []
        assert requests(driver) == {f"http://localhost:{port}"}

        driver.find_element(By.ID, "path").send_keys("/nowhere")
        driver.find_element(By.CSS_SELECTOR, "#ask button").click()
        shows(driver, "#life-problem", "no such file")


def test_the_page_shows_bandwidth_quotas_errors_and_events(mount: Mount, port: int) -> None:
    kv = mount(f"ram=64M,web={port}")
    kv.allow_log("'small/b' is (dropped at its close|cut off): .*( 4.0 MiB|quota is 4M)")
    quota = {"quota_hard": "4M", "eviction": "never"}
    request(kv.path, "ns_create", name="small", settings=quota, uid=0, gid=0)
    (kv.path / "small" / "a").write_bytes(b"a" * (1 << 20))
    with pytest.raises(OSError, match="quota"):
        (kv.path / "small" / "b").write_bytes(b"b" * (8 << 20))
    kv.kill_daemon()
    (kv.path / "small" / "a").read_bytes()
    with pytest.raises(OSError, match="quota"):
        (kv.path / "small" / "b").write_bytes(b"b" * (8 << 20))
    with chromium(1280, 900) as driver:
        driver.get(f"http://localhost:{port}/#space=small&order=large")
        shows(driver, "#space-name", "small")  # the address has the view
        shows(driver, "#h-charts + * + #charts", "Bandwidth")
        shows(driver, "#spaces", "25.0 %")
        shows(driver, "#charts figure:first-child .axis", "peak: 1.0 MiB")
        wait_for(lambda: "EDQUOT 0" not in text(driver, "#errors"), "errors are counted")
        shows(driver, "#events", "was killed by SIGKILL")
        shows(driver, "#events", "WARNING: 'small/b' is")
        pressed = "return document.querySelector('[data-order=large]').ariaPressed"
        assert driver.execute_script(pressed) == "true"
        wait_for(lambda: points(driver), "charts have lines")
        under = """
        const drawing = document.querySelector("#charts svg");
        const box = drawing.getBoundingClientRect();
        const at = {clientX: box.left + box.width - 1, clientY: box.top + 1};
        drawing.dispatchEvent(new PointerEvent("pointermove", at));
        return document.querySelector("#charts .under").textContent;
        """
        wait_for(lambda: "UTC: ram " in driver.execute_script(under), "values under the pointer")
        press(driver, "[data-span]", "last day")
        hash_ = "return location.hash"
        assert driver.execute_script(hash_) == "#span=day&order=large&space=small"
        assert errors(driver) == []


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_as_wide_as_a_phone(mount: Mount, port: int, *, dark: bool) -> None:
    kv = mount(f"ram=64M,nvme={{tmp}}/nvme,nvme_size=1G,web={port}")
    fill(kv)
    (kv.path / ("long" * 60)).write_bytes(b"c")
    kv.idle()
    assert (kv.path / ("long" * 60)).read_bytes()
    with chromium(360, 740, dark=dark) as driver:
        driver.get(f"http://127.0.0.1:{port}/")
        shows(driver, "#objects", "long" * 60)
        wait_for(lambda: points(driver), "charts have lines")
        driver.find_element(By.ID, "path").send_keys("long" * 60)
        driver.find_element(By.CSS_SELECTOR, "#ask button").click()
        shows(driver, "#life", "adaptive")
        widths = "return [document.documentElement.scrollWidth, window.innerWidth]"
        assert driver.execute_script(widths) == [360, 360]
        least = _least_contrast(driver)
        assert least >= 4.5, f"WCAG 2.1 AA asks for 4.5, found {least}"
        shows(driver, "#events", "mounted")  # a long path in a narrow table
        assert driver.execute_script(widths) == [360, 360]
        assert errors(driver) == []
    with chromium(700, 740, dark=dark) as driver:  # as little as shows more columns
        driver.get(f"http://127.0.0.1:{port}/")
        shows(driver, "#spaces", "adaptive")
        shows(driver, "#events", "mounted")
        needed, there = driver.execute_script(widths)
        assert needed <= there
        assert errors(driver) == []


def _least_contrast(driver: webdriver.Chrome) -> float:
    """The least contrast of all elements with text of their own to their background."""
    script = """
    const light = (color) => {
      const [r, g, b] = color.match(/[0-9.]+/g).slice(0, 3).map((part) => {
        const c = part / 255;
        return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
      });
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (one) => {
      for (; one; one = one.parentElement) {
        const color = getComputedStyle(one).backgroundColor;
        if (!/, 0\\)$/.test(color)) return color;
      }
      throw new Error("the page has no background");
    };
    let least = 21;
    for (const one of document.querySelectorAll("body *")) {
      if (![...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
      const [a, b] = [light(getComputedStyle(one).color), light(behind(one))];
      least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
    }
    return least;
    """
    found: float = driver.execute_script(script)
    return found


def test_a_takeover_is_said_and_the_page_goes_on(mount: Mount, port: int) -> None:
    kv = mount(f"ram=64M,watchdog=0,web={port}")
    with chromium(1280, 900) as driver:
        driver.get(f"http://127.0.0.1:{port}/")
        shows(driver, "#facts", "0 takeovers")
        daemon = kv.pid
        os.kill(daemon, signal.SIGSTOP)
        try:
            shows(driver, "#problem", "does not answer")
        finally:
            os.kill(daemon, signal.SIGCONT)
        kv.kill_daemon()
        shows(driver, "#facts", "1 takeovers")
        wait_for(lambda: text(driver, "#problem") == "", "all is well")


def test_page_socket_answers_the_mounting_user_only(mount: Mount, tmp_path: Path) -> None:
    path = tmp_path / "web.sock"
    kv = mount("ram=64M,web={tmp}/web.sock")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def answer(host: str) -> bytes:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(PATIENCE)
            asking.connect(str(path))
            asking.sendall(f"GET /api/now HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            with asking.makefile("rb") as stream:
                return stream.read()

    wait_for(lambda: b'"up": true' in answer("localhost:8080"), "an answer")
    assert answer("evil.example").startswith(b"HTTP/1.0 421")
    kv.umount("--now")
    assert not path.exists()
