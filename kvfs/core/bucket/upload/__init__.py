"""Uploads to the bucket, deletions of its keys, and the backlog of both."""
