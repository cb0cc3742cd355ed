"""One client: see the package's docstring."""

import json
import os
import random
import select
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from scripts.bench.workload import sealed
from scripts.bench.workload.evicted import Evicted
from scripts.bench.workload.pooled import Pooled
from scripts.bench.workload.private import Private
from scripts.bench.workload.shared import Shared
from scripts.bench.workload.task import FINDINGS_MAX, Answer, Calls, Finding, Task, WrongError

WATCH_PAUSE = 0.001  # s between two reads of the watcher: it must not take a CPU for itself
FULL = 50  # behaviours between two verifications of everything, about


class Client:
    """A task with what it needs."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.calls = Calls()
        self.rng = random.Random(f"{task.seed}:{task.client}")  # noqa: S311 (repeatable)
        self.answer = Answer()
        self._directories = 0

    def run(self) -> Answer:
        task = self.task
        if task.role == "fill":
            sealed.fill(task, self.calls)
        elif task.role == "check":
            for index in range(task.client, task.objects, task.clients):
                self._guard(partial(self._read_sealed, index))
        elif task.role == "watch":
            self._watch()
        elif task.role == "pool":
            self._share()
        else:
            self._work()
        self.answer.calls = dict(self.calls.counts)
        self.answer.slow = self.calls.slow
        return self.answer

    def _asked_to_stop(self) -> bool:
        enough = len(self.answer.findings) >= FINDINGS_MAX
        return enough or bool(select.select([sys.stdin], [], [], 0)[0])

    def _guard(self, behaviour: Callable[[], None]) -> bool:
        """Run a behaviour, and report an error as a finding. Returns whether it succeeded."""
        try:
            behaviour()
        except WrongError as error:
            self._found(error.kind, behaviour, error.path, error.detail)
        except FileNotFoundError as error:
            self._found("lost", behaviour, str(error.filename), "ENOENT of a name that is there")
        except OSError as error:
            self._found("failed", behaviour, str(error.filename), str(error))
        else:
            return True
        return False

    def _found(self, kind: str, behaviour: Callable[[], None], path: str, detail: str) -> None:
        name = getattr(behaviour, "__name__", "read_sealed")
        if len(self.answer.findings) < FINDINGS_MAX:
            found = Finding(kind, name, path, detail, time.monotonic())
            self.answer.findings.append(asdict(found))

    def _read_sealed(self, index: int) -> None:
        if not sealed.verify(self.task, self.calls, index):
            self.answer.misses += 1

    def _private(self) -> Private | Evicted:
        """A directory of its own; a new one after something went wrong in the last one."""
        self._directories += 1
        folder = f"{self.task.folder}/clients/{self.task.client}.{self._directories}"
        if self.task.evict:
            return Evicted(folder, self.calls, self.rng, self.answer)
        return Private(folder, self.calls, self.rng)

    def _work(self) -> None:
        private = self._private()
        shared = Shared(self.task, self.calls, self.rng, self.answer)

        def read_sealed() -> None:
            self._read_sealed(sealed.choose(self.task, self.rng))

        others = {read_sealed: 25} | ({} if self.task.evict else shared.behaviours)
        while not self._asked_to_stop():
            choices = private.behaviours | others
            (behaviour,) = self.rng.choices(list(choices), list(choices.values()))
            if not self._guard(behaviour) and behaviour in private.behaviours:
                private = self._private()
        self._guard(private.finish)

    def _share(self) -> None:
        """Use what the nodes of a pool share."""
        pooled = Pooled(self.task, self.calls, self.rng, self.answer)
        choices = list(pooled.behaviours), list(pooled.behaviours.values())
        while not self._asked_to_stop():
            (behaviour,) = self.rng.choices(*choices)
            self._guard(behaviour)
        self._guard(pooled.finish)

    def _watch(self) -> None:
        """Read one open file all the time: who has a file open should feel nothing."""
        index = self.task.client % self.task.objects
        data = sealed.content(self.task.seed, index)
        name = sealed.path(self.task, index)
        fd = self.calls.open(name, os.O_RDONLY)

        def read() -> None:
            if self.calls.pread(fd, len(data) + 1, 0) != data:
                raise WrongError("wrong", name, "other bytes by a descriptor that stayed open")

        while not self._asked_to_stop():
            self._guard(read)
            time.sleep(WATCH_PAUSE)
        self.calls.close(fd)


print(json.dumps(asdict(Client(Task.from_json(sys.argv[1])).run())))
