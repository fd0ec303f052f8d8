"""Show people what a shard would train, before they train on it.

``text``, ``tally``, ``origin``, ``summary``, ``diff`` and ``page`` produce the output of ``inspect``. Nothing here
changes a shard.
"""
