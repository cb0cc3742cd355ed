"""Benchmarks of a mount against what it stands on, on this machine, in one run.

From the root of the repository, as root, after scripts/install.sh:

    .venv/bin/python -m scripts.bench.engines --peer PASSTHROUGH_HP --json engines.json
    .venv/bin/python -m scripts.bench.io --json io.json
    .venv/bin/python -m scripts.bench.ops --json ops.json     # 10^3 and 10^6 objects: long
    .venv/bin/python -m scripts.bench.ops --objects 20000     # 10^3 and 2 * 10^4: a minute
    .venv/bin/python -m scripts.bench.soak --kills 200 --objects 100000 --seconds 600
    .venv/bin/python -m scripts.bench.pool                    # reads of a peer, on loopback
    .venv/bin/python -m scripts.bench.pool_scale              # what objects cost the index
    .venv/bin/python -m scripts.bench.replay TRACE            # hit ratios: as the simulator says?

Each benchmark mounts kvfs in a temporary folder and always unmounts it. Things that are compared
are measured in turns (A B A B ...), so that a ratio is less noisy than the two figures behind it.
The first round only warms up. Contents are checked outside of the timed parts. No benchmark fails
for being slow: the bars are shown with their verdicts. Only soak.py and engines.py fail, for a
wrong byte and the like.
"""
