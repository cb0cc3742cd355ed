"""Is there room? Where does a new file begin, and what is evicted for it?

Contract: a reservation is made here and nowhere else; victims are chosen here.
"""
