"""Who owns an object, and what is it worth? Namespaces, their settings, and the orders of eviction.

Contract: pure state in memory and in the catalog. Nothing here knows which copies exist.
"""
