"""The former name of `kvfs.connectors`, which engines' configurations may still use.

Contract: `kvfs.engines.X` loads the same file as `kvfs.connectors.X`. The next version drops it.
"""

from kvfs import connectors

__path__ = connectors.__path__
