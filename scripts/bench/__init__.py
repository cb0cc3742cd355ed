"""Benchmarks of a mount against what it stands on, on this machine, in one run.

From the root of the repository, as root, after scripts/install.sh:

    .venv/bin/python -m scripts.bench.io --json io.json
    .venv/bin/python -m scripts.bench.ops --json ops.json     # 10^3 and 10^6 objects: long
    .venv/bin/python -m scripts.bench.ops --objects 20000     # 10^3 and 2 * 10^4: a minute
    .venv/bin/python -m scripts.bench.soak --kills 200 --objects 100000 --seconds 600
    .venv/bin/python -m scripts.bench.replay TRACE            # hit ratios: as the simulator says?

Each mounts kvfs by itself in a temporary folder and unmounts it whatever happens. What is
compared is measured in turns (A B A B ...), so a ratio holds on a noisy machine better than the
two figures it is made of; the first round only warms up. Contents are checked outside of what is
timed. Nothing here fails for being slow: the bars are shown with their verdicts. Only soak.py
fails, for a wrong byte and its like.
"""
