"""Looking for what is wrong: the catalog in itself, and against the files of the tiers, both ways.

Contract: a check changes nothing unless told to repair, never waits for a disk in the loop, and may
run beside the operations of a mount. What it reports was confirmed in the step in which it was
mended, or would have been. A repair loses no object of which a good copy is left.
"""

from kvfs.core.check.background import Background
from kvfs.core.check.check import check
from kvfs.core.check.survey import Finding, Survey

__all__ = ["Background", "Finding", "Survey", "check"]
