"""The console command ``megatron-sft-idx <command>``: a command parses its options, calls another folder, and prints.

No work is done here, so a program can do everything that a command can. The other folders serve both, and import
nothing from here. ``options`` has the declaration of commands, ``streams`` the handling of failing standard streams.
"""
