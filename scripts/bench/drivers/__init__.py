"""Drivers of real connectors, for scripts/bench/engines.py: one module for each storage class.

Contract: a driver runs in a process of its own, in the Python environment of the engines, and stays
there for all turns, because an import of an engine takes 10 s. `serve.py` makes the driver and
reads the turns from standard input. In a turn the driver gets a fresh directory, and numbers that
no turn before had. It puts objects, and gets them in the same order. Content follows from an
object's number. The driver compares every byte outside of the measured time, and raises
WrongBytesError for the first difference. Comparing also does what an engine does between two calls:
it moves memory, on all processors, through the processors' caches.

A connector that keeps an index in its process starts each turn with a new one.
"""
