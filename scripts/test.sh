#!/bin/bash
# The whole gate: lint, format, types, then every test with branch coverage. Installs what that
# needs. Arguments go to pytest: scripts/test.sh -k umount tests/unit
#
# The daemon and its movers run in processes of their own; coverage counts them because
# pyproject.toml asks for `patch = subprocess`, so nothing here or in a test need pass it on.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh test
scripts/install-clients.sh

bin=.venv/bin
$bin/ruff check .
$bin/ruff format --check .
$bin/mypy

$bin/coverage erase
result=0
$bin/coverage run -m pytest "$@" || result=$?
$bin/coverage combine --quiet || true # nothing to combine if not a single test ran
$bin/coverage report || true
exit $result
