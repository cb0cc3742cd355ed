"""Copies between RAM and NVMe: demotion, promotion, digests, write-back and the trash.

Contract: a move that fails leaves every object as it was.
"""
