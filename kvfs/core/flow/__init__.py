"""Movement in the background: jobs for the movers, each kind in a module of its own; the trash.

`flow.py` dispatches. `demotion.py`, `promotion.py` and `settlement.py` each say when and what, and
do it, by what they share: `transfers.py` copies and enters, `trouble.py` is what failed.
"""

from kvfs.core.flow.flow import Flow

__all__ = ["Flow"]
