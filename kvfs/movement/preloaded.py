"""Loaded by the process of which the workers for a bucket are forks, before the first of them.

Contract: importing it takes 0.5 s, which no fork has to spend again. It knows no credentials and
asks nobody. Not for anything that has threads or connections, which forks must not share.
"""

from kvfs.movement import downloading, looking, uploading  # noqa: F401
from kvfs.s3 import boto

boto.preload()
