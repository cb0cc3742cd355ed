"""The pool in the core: announces our objects, finds those of other nodes, and fetches them.

Contract: without the option `pool` nothing of this package exists. An object that only other nodes
have is *remote* here: its record has `in_pool`, and no tier holds it. A remote object is a guess of
the index: it goes when the kernel forgets it, at a mount, and when no live node gives its bytes.
No local copy is ever removed because the index lacks an object: an index may be lost. It is removed
if the index says that a node has unlinked or replaced the object.
"""
