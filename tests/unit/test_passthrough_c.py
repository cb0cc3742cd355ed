"""The C module alone, without a mount; in processes of its own: it must come before pyfuse3."""

import subprocess
import sys

import pytest

BEFORE = "from kvfs.fuse.passthrough import Passthrough, _passthrough as c, SLOTS\n"


def python(code: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refused(call: str, error: str) -> str:
    return f"try: {call}\nexcept {error} as e: print(e)\nelse: raise SystemExit('not refused')\n"


def test_nothing_is_known_before_a_session() -> None:
    assert python("print(c.state())") == "(False, False)"


def test_a_binding_needs_a_session() -> None:
    assert "attached session" in python(refused("c.bind(1, 1, True)", "ValueError"))


@pytest.mark.parametrize("handle", ["SLOTS", "SLOTS + 1", "2**64 - 1"])
def test_a_handle_beyond_the_slots_is_refused(handle: str) -> None:
    code = "c.attach(0, True)\nc.bind(SLOTS - 1, 5, False)\n"
    said = python(code + refused(f"c.bind({handle}, 1, True)", "ValueError"))
    assert "expected less than 1048576" in said


@pytest.mark.parametrize("call", ["c.bind('1', 1, True)", "c.bind(1)", "c.attach(2**40, True)"])
def test_other_arguments_are_refused(call: str) -> None:
    python(refused(call, "(TypeError, OverflowError)"))


def test_attaching_again_forgets_the_former_session() -> None:
    assert python("c.attach(0, True)\nc.attach(0, False)\nprint(c.state())") == "(False, False)"


def test_what_is_no_fuse_device_gives_no_backing() -> None:
    code = "import os\nnull = os.open('/dev/null', os.O_RDWR)\nc.attach(null, True)\n"
    said = python(
        code + refused("c.open_backing(null)", "OSError") + refused("c.close_backing(7)", "OSError")
    )
    assert said.count("Errno 25") == 2  # ENOTTY


def test_it_says_why_it_is_off() -> None:
    said = python(
        "for wanted in (True, False):\n"
        "    one = Passthrough(0, wanted=wanted)\n"
        "    print(one.on, one.register(0), one.why)\n"
    )
    assert said.splitlines() == [
        "False 0 this kernel does not offer FUSE_PASSTHROUGH (Linux 6.9 and later do)",
        "False 0 turned off by passthrough=off",
    ]


def test_it_must_come_before_pyfuse3() -> None:
    code = f"import pyfuse3\n{refused('import kvfs.fuse.passthrough', 'ImportError')}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "must be imported before pyfuse3" in done.stdout
