"""Paths and attributes: directories, links, renames, and walks through trees.

Contract: the content of files is not touched here.
"""
