"""Namespaces: the owner and the worth of each object, their settings, and the eviction orders.

Contract: pure state in memory and in the catalog. Nothing here knows which copies exist.
"""
