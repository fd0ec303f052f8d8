"""One console command, ``megatron-sft-idx <verb>``: a module a verb, which parses, calls and prints.

The work itself is done in the other folders, which serve programs too and import nothing from here. What verbs share
is in ``options``, ``output`` and ``streams``.
"""
