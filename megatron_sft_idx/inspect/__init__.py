"""What a shard holds, shown to people, and how fast it is read.

``text``, ``tally``, ``summary``, ``diff`` and ``page`` are what the verb inspect shows; ``place``, ``read_worker``,
``bench_read`` and ``recommend`` measure ways of reading and name one. Nothing here changes a shard.
"""
