"""Packs in motion: many shards to one and one to many, by copying ranges of bytes that are held to their checksums.

Nothing here looks inside a pack: rules of packs are checked where a shard is written, or by ``verify``.
"""
