"""Connectors for engines, one module each, loaded by the engine itself: docs/engines.md.

Contract: thin, over `kvfs.client`. A module imports its engine, so it is imported in the engine's
process only; nothing of kvfs imports one. Whatever is not to be had is a miss; nothing is raised
through an engine's step. Not for configurations: `kvfs.profiles`.
"""
