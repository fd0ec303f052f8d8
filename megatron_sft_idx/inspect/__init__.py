"""Lets people see what a shard would teach, before they train on it.

``text``, ``tally``, ``origin``, ``summary``, ``diff`` and ``page`` make what the verb inspect shows. Nothing here
changes a shard.
"""
