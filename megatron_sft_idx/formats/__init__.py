"""Packed SFT data in other formats: detect, read, write and convert them.

Each format is a module, listed in ``registry``, with ``recognise``, a ``Reader`` and usually a ``Writer``; ``base`` has
their common code. ``packed_dataset`` gives random access to any of them, ``convert`` converts between them. Nothing
here tokenises, repacks or imports torch, and no code from a file is ever run.
"""
