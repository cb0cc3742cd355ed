"""Check the catalog in itself, and the catalog against the files of the tiers, both ways.

Contract: a check changes nothing unless told to repair, never waits for a disk in the loop, and may
run beside the operations of a mount. It confirms each finding in the step of the loop in which it
mends it, or would mend it. A repair loses no object of which a good copy is left.
"""

from kvfs.core.check.background import Background
from kvfs.core.check.check import check
from kvfs.core.check.survey import Finding, Survey

__all__ = ["Background", "Finding", "Survey", "check"]
