"""Client processes that use a mount in every way that programs do, and verify all they see.

`python -m scripts.bench.workload TASK` is one client; TASK is a `task.Task` as JSON. It works until
its standard input ends, then verifies all once more and prints what it found as one line of JSON.
It knows nothing of kvfs: on any file system of Linux it must find nothing.
Not for deciding what happens to the file system meanwhile: soak.py and tests/faults do.
"""
