"""What a shard holds, shown to people, and how fast it is read.

``text``, ``tally``, ``origin``, ``summary``, ``diff`` and ``page`` make what the verb inspect shows. ``medium``,
``read_worker`` and ``bench_read`` measure ways of reading a shard and recommend one. Nothing here changes a shard.
"""
