"""Which objects and copies exist, and which are open? The accounts of tiers and namespaces.

Contract: a change of the catalog and its consequences happen in one step, without an await.
"""
