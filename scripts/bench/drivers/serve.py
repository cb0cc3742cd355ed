"""The process of one driver: reads turns from standard input, answers on standard output.

    python -m scripts.bench.drivers.serve MODULE CLASS BYTES_EACH [ARGUMENT]

A turn is a line of JSON: `{"folder": ..., "first": ..., "count": ...}`. The answer is one line too:
`{"seconds": {phase: [...]}}`, or `{"error": ...}`. The first line, before any turn, is `{}`: the
engine is imported. The output of the engine itself goes to standard error.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from scripts.bench.drivers.driver import Driver


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(said: dict[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    module, name, bytes_each, *arguments = sys.argv[1:]
    try:
        found = importlib.import_module(f"scripts.bench.drivers.{module}")
        driver: Driver = getattr(found, name)(int(bytes_each), *arguments)
        answer({})
        for line in sys.stdin:
            asked = json.loads(line)
            numbers = range(asked["first"], asked["first"] + asked["count"])
            answer({"seconds": driver.turn(Path(asked["folder"]), numbers)})
    except BaseException as error:  # noqa: BLE001  (the benchmark says it and fails)
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)  # engines' threads do not end by themselves


if __name__ == "__main__":
    main()
