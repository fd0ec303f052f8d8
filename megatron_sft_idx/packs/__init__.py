"""Move packs: runs of packs in memory, merging and splitting shards, copying whole shards.

Bytes that are copied are checked against their checksums on the way.
"""
