#!/bin/bash
# Installs the real engines (vLLM, and of LMCache and SGLang the storage code) into .venv-clients/, for
# the tests that drive them: 2.7 GB, so apart from .venv and only when their requirements have changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv-clients
requirements=tests/clients/requirements.txt
without_dependencies=tests/clients/requirements-nodeps.txt # their full lists would pull in CUDA

wanted=$({
    cat "$requirements" "$without_dependencies"
    "$python" -V
} | sha256sum)
[ "$(cat $venv/.installed 2>/dev/null)" != "$wanted" ] || exit 0

echo "install-clients: vLLM, LMCache and SGLang into $venv" >&2
"$python" -m venv --clear $venv
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" --requirement "$requirements"
"${pip[@]}" --no-deps --requirement "$without_dependencies"
echo "$wanted" >$venv/.installed
