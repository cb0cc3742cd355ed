#!/bin/bash
# The whole gate: lint, format, types, then every test, on as many processors as there are (four at
# most: each has daemons and stores of its own). Installs what that needs. Arguments go to pytest:
# scripts/test.sh -k umount tests/unit
#
# scripts/test.sh --fast [ARGUMENT...] is for while one works: lint, types, tests/unit, and
# tests/semantics on one kind of mount. It needs no engines.
#
# A wait that ran out is tried once more, because the machine may be shared, and is listed at the end
# (RERUN). Any other failure is one. A missing file is exactly the failure that a cache must report.
#
# COVERAGE=1 counts branches as well, which takes half as long again, in one process. The daemon and
# its movers run in processes of their own; they are counted because pyproject.toml asks for
# `patch = subprocess`, so nothing here or in a test need pass it on.
set -euo pipefail
cd "$(dirname "$0")/.."
fast=()
if [ "${1:-}" = --fast ]; then
    shift
    fast=(tests/unit tests/semantics)
    export KVFS_TEST_MOUNTS=kernel # of those in tests/semantics/conftest.py
fi
# Each mount of a test starts four processes or more, which would all compile kvfs again.
unset PYTHONDONTWRITEBYTECODE
scripts/install.sh test
[ ${#fast[@]} -gt 0 ] || scripts/install-clients.sh

bin=.venv/bin
$bin/ruff check .
$bin/ruff format --check .
$bin/mypy

again=(-raR --reruns 1 --only-rerun "not within [0-9]+ s: ")
if [ -z "${COVERAGE:-}" ]; then
    # tests/conftest.py says which files begin.
    exec $bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile \
        --no-loadscope-reorder "${again[@]}" "${fast[@]}" "$@"
fi
$bin/coverage erase
result=0
$bin/coverage run -m pytest "${again[@]}" "${fast[@]}" "$@" || result=$?
$bin/coverage combine --quiet || true # nothing to combine if not a single test ran
$bin/coverage report || true
exit $result
