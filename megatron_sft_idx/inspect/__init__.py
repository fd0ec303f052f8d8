"""Lets people see what a shard would teach, before they train on it, and find out how to read it fast.

``text``, ``tally``, ``origin``, ``summary``, ``diff`` and ``page`` make what the verb inspect shows. ``medium``,
``read_worker`` and ``bench_read`` measure ways of reading a shard and recommend one. Nothing here changes a shard.
"""
