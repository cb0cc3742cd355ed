"""Is there room? In which tier does a new file begin, and which objects are evicted for it?

Contract: a reservation is made here and nowhere else; victims are chosen here.
"""
