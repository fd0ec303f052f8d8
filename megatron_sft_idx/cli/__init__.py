"""One console command, ``megatron-sft-idx <verb>``: verbs are declared, call one function of a room, and print.

The work itself is done in the other folders, which serve programs too and import nothing from here. How verbs are
declared, and the options they share, is in ``options``; how a standard stream may fail, in ``streams``.
"""
