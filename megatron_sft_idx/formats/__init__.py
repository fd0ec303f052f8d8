"""Packed SFT data in other formats: recognised, read, written, and converted into each other.

Each format is a module, listed in ``registry``, with ``recognise``, a ``Reader`` and mostly a ``Writer``; ``base`` is
what they share. ``packed_dataset`` reads any of them by number, ``convert`` writes any from any. Nothing here
tokenises, packs anew or imports torch, and no code that a file names is run.
"""
