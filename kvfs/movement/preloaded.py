"""Modules that one process loads, before it forks the workers for a bucket.

Contract: importing it takes 0.5 s, which no fork has to spend again. It has no credentials and
sends no request. Not for threads or connections, which forks must not share.
"""

from kvfs.movement import downloading, looking, uploading  # noqa: F401
from kvfs.s3 import boto

boto.preload()
