"""Packs in motion: in memory as runs, many shards to one and one to many, whole shards to other places.

Bytes that are copied are held to their checksums on the way.
"""
