"""Runs drivers of one engine, each time in a new process, and imports the engine once.

    fork.py DRIVER DESCRIPTOR

Importing an engine takes seconds; a fork of a process that has imported it takes none. This process
executes DRIVER as far as its imports, and calls its `prepare`, if it has one. Then each connection
to the socket DESCRIPTOR brings one JSON line: a driver and its arguments, a directory, the
environment, and the files for its output. The answer is the exit status of a process that ran the
driver with these. The server ends when its standard input does.

Runs in the clients' own environment (scripts/install-clients.sh), never inside the tests' one.
"""

import gc
import json
import os
import runpy
import selectors
import socket
import sys
import traceback
from pathlib import Path
from typing import Any


def run(wanted: dict[str, Any]) -> None:
    """Become a process that was started with these arguments; does not return."""
    status = 1
    try:
        os.chdir(wanted["directory"])
        os.environ.update(wanted["environment"])
        for number, name in enumerate((os.devnull, *wanted["printed"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        sys.argv = wanted["command"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  (as at the end of any interpreter)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    driver, number = sys.argv[1:]
    sys.path.insert(0, str(Path(driver).parent))
    runpy.run_path(driver, run_name="imported").get("prepare", lambda: None)()
    gc.freeze()  # no collection of a run looks through the engine's modules
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.buffer, selectors.EVENT_READ)
    with socket.socket(fileno=int(number)) as door:
        selector.register(door, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin.buffer:
                    return
                if key.fileobj is door:
                    asker, _ = door.accept()
                    wanted = json.loads(asker.makefile().readline())
                    pid = os.fork()
                    if pid == 0:
                        run(wanted)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asker))
                else:
                    pid, asker = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    asker.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                    asker.close()


if __name__ == "__main__":
    main()
