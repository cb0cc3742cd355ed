"""The kernel's side of kvfs: decodes requests, calls the core, maps errors. Holds no policy.

A wheel has pyfuse3 in `kvfs/bundled` (scripts/build-wheel.sh). It comes before any pyfuse3 of the
environment: the C extension and pyfuse3 must use the same libfuse, which is in the wheel as well.
"""

import sys
from pathlib import Path

_bundled = Path(__file__).parents[1] / "bundled"
if _bundled.is_dir() and str(_bundled) not in sys.path:
    sys.path.insert(0, str(_bundled))
