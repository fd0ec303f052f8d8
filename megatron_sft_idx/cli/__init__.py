"""One console command, ``megatron-sft-idx <verb>``: a verb parses its options, calls another folder, and prints.

No work is done here, so that whatever a verb can do a program can do as well: the other folders serve both, and import
nothing from here. How verbs are declared is in ``options``; how a standard stream may fail, in ``streams``.
"""
