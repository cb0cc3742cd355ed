"""An engine's environment has torch and xxhash, but none of the packages that a mount needs."""

import subprocess
import sys

ABSENT = (
    *("pyfuse3", "trio", "trio_parallel", "rocksdict", "click", "rich", "boto3", "botocore"),
    *("blosc", "prometheus_client", "matplotlib", "transformers", "safetensors"),
)
PROGRAM = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # importing it is an ImportError
import kvfs.client
print(*sorted(name for name in sys.modules if name.startswith("kvfs")))
"""


def test_kvfs_client_needs_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert loaded - {"kvfs", "kvfs.errors", "kvfs.leasing", "kvfs.matching", "kvfs.prefix"} == {
        name for name in loaded if name == "kvfs.client" or name.startswith("kvfs.client.")
    }
