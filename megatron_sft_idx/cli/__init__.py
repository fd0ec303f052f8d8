"""The console command ``megatron-sft-idx <verb>``: a verb parses its options, calls another folder, and prints.

No work is done here, so a program can do everything that a verb can. The other folders serve both, and import nothing
from here. ``options`` has the declaration of verbs, ``streams`` the handling of failing standard streams.
"""
