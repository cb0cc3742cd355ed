"""Modules that one process loads, before it forks the workers for a bucket.

Contract: the import of this module takes 0.5 s, once for all workers. It uses no credentials and
sends no request. It must make no threads or connections, because forks cannot share them.
"""

from kvfs.movement import downloading, looking, uploading  # noqa: F401
from kvfs.s3 import boto

boto.preload()
