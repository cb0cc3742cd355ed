#!/bin/bash
# Fuzz every parser for MINUTES (5): the tests of tests/*/test_fuzz_*.py, which the suite runs for
# some seconds, again and again with many more inputs and a new seed each time. Ends with 1, and how
# to repeat it, when an input does what no input should; put it into its test as an @example.
#
#     scripts/fuzz.sh [MINUTES] [PYTEST ARGUMENT...]        such as: scripts/fuzz.sh 60 -k metadata
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=${1:-5}
[[ $minutes =~ ^[0-9]+$ ]] || { echo "fuzz.sh: $minutes: expected a number of minutes" >&2; exit 2; }
shift || true
python=${PYTHON:-.venv/bin/python}
[[ -x $python ]] || { echo "fuzz.sh: $python is not there: scripts/install.sh test" >&2; exit 2; }

export KVFS_FUZZ_EXAMPLES=${KVFS_FUZZ_EXAMPLES:-2000}
end=$((SECONDS + minutes * 60)) rounds=0
while ((SECONDS < end || rounds == 0)); do
	seed=$RANDOM$RANDOM
	echo "fuzz.sh: round $((rounds += 1)), seed $seed"
	"$python" -m pytest -q -p no:cacheprovider -o timeout=3600 --hypothesis-seed="$seed" \
		tests/unit/test_fuzz_*.py tests/s3/test_fuzz_*.py tests/pool/test_replies.py "$@" ||
		{ echo "fuzz.sh: seed $seed with KVFS_FUZZ_EXAMPLES=$KVFS_FUZZ_EXAMPLES found the above" >&2; exit 1; }
done
echo "fuzz.sh: $rounds rounds, nothing found"
