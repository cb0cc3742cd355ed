"""The C module alone, without a mount; in processes of its own: it must come before pyfuse3."""

import subprocess
import sys

import pytest

BEFORE = """
import os, socket, struct, tempfile
from kvfs.fuse.passthrough import FILE_SIZE, SLOTS, Passthrough, Slot, SlotState, _passthrough as c
device, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
file = tempfile.TemporaryFile()
file.truncate(FILE_SIZE)
def attach(takeover=False):
    c.attach(device.fileno(), True, file.fileno(), takeover)
"""


def python(code: str) -> str:
    """Run the code in a new Python process, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refused(call: str, error: str) -> str:
    return f"try: {call}\nexcept {error} as e: print(e)\nelse: raise SystemExit('not refused')\n"


def test_state_is_false_before_a_session() -> None:
    assert python("print(c.state())") == "(False, False, False)"


def test_a_binding_needs_a_session() -> None:
    call = "c.bind(1, 2, 3, 4, True, False, True, 1)"
    assert "attached session" in python(refused(call, "ValueError"))


@pytest.mark.parametrize("handle", ["SLOTS", "SLOTS + 1", "2**64 - 1"])
def test_a_handle_beyond_the_slots_is_refused(handle: str) -> None:
    code = "attach()\nc.bind(SLOTS - 1, 2, 3, 5, False, False, True, 1)\n"
    said = python(code + refused(f"c.bind({handle}, 2, 3, 1, True, False, True, 1)", "ValueError"))
    assert "expected less than 1048576" in said


@pytest.mark.parametrize("call", ["c.bind('1')", "c.bind(1)", "c.attach(2**40, True, 0, False)"])
def test_other_arguments_are_refused(call: str) -> None:
    python(refused(call, "(TypeError, OverflowError)"))


def test_a_file_of_another_size_is_refused() -> None:
    said = python("file.truncate(5)\n" + refused("attach()", "ValueError"))
    assert "session file of 5 bytes, expected" in said


def test_slots_outlive_the_process() -> None:
    code = """
if not os.fork():
    attach()
    c.bind(7, 1 << 40, (1 << 62) + 1, 3, True, False, True, 2)
    c.bind(8, 5, 6, 0, False, True, False, 1)
    c.set_state(8, c.OPEN)
    c.bind(9, 5, 6, 0, False, False, False, 1)
    c.set_state(9, c.FREE)
    os._exit(0)
os.wait()
attach(takeover=True)
for slot in Passthrough.slots(): print(*slot[:4], slot.state.name, *slot[5:])
"""
    assert python(code).splitlines() == [
        f"7 {1 << 40} {(1 << 62) + 1} 3 BOUND True 2 False",
        "8 5 6 0 OPEN False 1 True",
    ]


def test_other_device_than_fuse_gives_no_backing() -> None:
    code = "null = os.open('/dev/null', os.O_RDWR)\nc.attach(null, True, file.fileno(), False)\n"
    said = python(
        code
        + refused("c.open_backing(null, 0)", "OSError")
        + refused("c.close_backing(7, 0)", "OSError")
        + "print(c.backings())"
    )
    assert said.count("Errno 25") == 2  # ENOTTY
    assert said.endswith("[]")


def test_passthrough_that_is_off_gives_its_reason() -> None:
    said = python(
        "for why in ('', 'turned off'):\n"
        "    one = Passthrough(unwanted=why)\n"
        "    one.attach(device.fileno(), file.fileno(), takeover=False)\n"
        "    print(one.on, one.negotiated, one.register(0), one.why)\n"
    )
    assert said.splitlines() == [
        "False False 0 this kernel does not offer FUSE_PASSTHROUGH (Linux 6.9 and later do)",
        "False False 0 turned off",
    ]


def test_the_kernel_is_told_of_a_name_that_is_gone() -> None:
    """NOTIFY_INVAL_ENTRY: header (length, 3, 0), then parent, length, padding, name, NUL."""
    code = """
attach()
Passthrough.invalidate_name(5, b'name', 7)
print(*struct.unpack('<IiQQII5s', kernel.recv(100)))
"""
    assert python(code) == r"37 3 0 5 4 0 b'name\x00'"


def test_the_teller_has_nothing_open_but_the_device() -> None:
    """Else it would keep the locks of a daemon that was killed while it waits in the kernel."""
    code = """
attach()
Passthrough.invalidate_name(5, b'name', 7)
kernel.recv(100)
[tid] = set(os.listdir('/proc/self/task')) - {str(os.getpid())}
print(os.listdir(f'/proc/self/task/{tid}/fd') == [str(device.fileno())])
"""
    assert python(code) == "True"


def test_import_after_pyfuse3_is_refused() -> None:
    code = f"import pyfuse3\n{refused('import kvfs.fuse.passthrough', 'ImportError')}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "must be imported before pyfuse3" in done.stdout


def test_invalidated_tree_is_told_to_the_kernel_at_once() -> None:
    """FUSE_NOTIFY_INC_EPOCH, in the caller's thread: a header without a body."""
    assert (
        python(
            "attach()\nmount = Passthrough()\nmount._device = device.fileno()\n"
            "mount.invalidate_tree(1, b'a', 2)\nprint(struct.unpack('<IiQ', kernel.recv(99)))"
        )
        == "(16, 8, 0)"
    )


def test_the_bytes_of_a_read_are_in_no_object_of_python() -> None:
    """The bytes come from the file, up to its end; without the file there are none."""
    code = """
attach()
data = tempfile.TemporaryFile()
data.write(b'0123456789')
data.flush()
print(c.fill(7, data.fileno(), 4, 100, False), c.fill(7, 9999, 0, 1, False))
print(Passthrough.fill(7, data.fileno(), 10, 5, nowait=False))
"""
    assert python(code).splitlines() == ["True False", "True"]
