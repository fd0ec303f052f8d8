"""Every format of packed SFT data there is: recognised, read, written, and converted into each other.

A module a format, listed in ``registry``, each with ``recognise``, a ``Reader`` and mostly a ``Writer``; ``base`` is
what they share, ``convert`` goes from any to any. Nothing here tokenises, packs anew or imports torch.
"""
