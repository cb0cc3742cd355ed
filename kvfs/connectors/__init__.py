"""Connectors for engines, one module each, loaded by the engine itself: docs/engines.md.

Contract: thin, over `kvfs.client`. A module imports its engine, so only the engine's process
imports the module; no other part of kvfs does. Bytes that cannot be had are a miss; no error is
raised through an engine's step. Not for configurations: `kvfs.profiles`.
"""
