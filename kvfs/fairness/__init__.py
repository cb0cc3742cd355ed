"""Limits, fair queues, wear of the flash and hot objects: the share of each namespace.

This package knows no tiers, files or records; its callers tell the cost of each request.
"""
