"""What a shard holds, shown to people, and how fast it is read.

``text``, ``tally``, ``survey``, ``summary``, ``diff`` and ``page`` are what the verb inspect shows; ``place``,
``reading``, ``bench_read`` and ``advice`` measure and recommend ways of reading. Nothing here changes a shard.
"""
