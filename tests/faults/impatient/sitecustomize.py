"""On PYTHONPATH of a daemon under test: waits of 10 s by default take a second.

Tests with the real waits would take too long; an option that only tests need would be one more to
explain.
"""

from kvfs.daemon import bucket
from kvfs.movement import movers
from kvfs.tiers import calls

calls.DEADLINE = 1.0
calls.SYNC_DEADLINE = calls.PROBE_DEADLINE = 2.0
calls.PROBE_PERIOD = 0.2
movers.PATIENCE = 5.0
bucket.PATIENCE = 3.0
