"""The bytes of a ``.pbin``, Modalities' file of tokenised documents, in its four generations.

::

    header | data: the tokens of all documents end to end | index: pickled [(offset, length), ...], in bytes

The header begins with the length of the data in bytes (8 bytes); from the second generation on, the bytes of a token
follow (4 bytes, the number 1, 2 or 4). There is no magic, no version and no checksum: what a file is can only be told
from what fits. The project's history (Modalities/modalities, ``create_packed_data.py``) knows four layouts:

=== ============== ====== ========== =============== ============================== ========
no. written from   header byte order token           offsets count from             first is
=== ============== ====== ========== =============== ============================== ========
1   December 2023  8      big        4 bytes         the file's start               8
2   January 2024   12     big        1, 2 or 4 bytes the file's start               12
3   April 2024     12     little     1, 2 or 4 bytes the file's start               12
4   June 2024      12     little     1, 2 or 4 bytes the data's start               0
=== ============== ====== ========== =============== ============================== ========

Evidence that tells them apart: a header of the right size and byte order gives a data length that ends inside the
file, where a pickle begins that ends with the file; the wrong ones give astronomical lengths, or no pickle. Between 3
and 4, and for certainty everywhere, the first offset decides. Where an index is empty nothing can differ: it is a 4.

Not read: what the first experiments of November 2023 wrote (a header of 4 bytes), and tokens of 3 bytes, which a few
development versions of December 2024 chose for large vocabularies and no version's reader ever took.

Documents tile the data in the order of the index: every writer of the format only appends. That is what makes the
damage of its merge tool visible: it moves the index entries of each further file by 12 bytes, a header, too little (see
``Placement``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.modalities.pickled_pairs import LIST_HEADS
from megatron_sft_idx.storage import open_array, open_regular

__all__ = ["GENERATIONS", "HEADER_NBYTES", "Framing", "Generation", "encode_header", "find_framing", "framings"]

HEADER_NBYTES = 12  # of all generations but the first
_LENGTH_NBYTES = 8
_TOKEN_NBYTES = (1, 2, 4)

ByteOrder = Literal["big", "little"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One layout of the file.

    Attributes:
        number: 1 to 4.
        since: when it was first written.
        byte_order: of the header and the tokens.
        header_nbytes: 8 or 12.
        first_offset: what the index says of the data's first byte.
    """

    number: int
    since: str
    byte_order: ByteOrder
    header_nbytes: int
    first_offset: int


GENERATIONS = (
    Generation(1, "December 2023", "big", 8, 8),
    Generation(2, "January 2024", "big", HEADER_NBYTES, 12),
    Generation(3, "April 2024", "little", HEADER_NBYTES, 12),
    Generation(4, "June 2024", "little", HEADER_NBYTES, 0),
)


@dataclass(frozen=True, slots=True)
class Framing:
    """Where the three parts of a file are: all that can be told without the index.

    Attributes:
        byte_order: of the header and the tokens.
        header_nbytes: 8 or 12.
        token_nbytes: 1, 2 or 4.
        data_nbytes: a multiple of ``token_nbytes``.
        file_nbytes: size of the file.
    """

    byte_order: ByteOrder
    header_nbytes: int
    token_nbytes: int
    data_nbytes: int
    file_nbytes: int

    @property
    def index_offset(self) -> int:
        """Where the data ends and the index begins, in bytes."""
        return self.header_nbytes + self.data_nbytes

    @property
    def num_tokens(self) -> int:
        """Tokens in the data."""
        return self.data_nbytes // self.token_nbytes

    def __str__(self) -> str:
        return (
            f"a {self.header_nbytes}-byte {self.byte_order}-endian header says {self.data_nbytes} bytes of data in"
            f" tokens of {self.token_nbytes}, and a pickle goes from there to the end"
        )

    def open_tokens(self, path: str) -> NDArray[Any]:
        """The data, mapped, as it is on disk: unsigned tokens in the file's byte order."""
        # Not newbyteorder(), which spells this machine's own order out: kernels take such a dtype for a foreign one.
        dtype = np.dtype(f"{'<' if self.byte_order == 'little' else '>'}u{self.token_nbytes}")
        tokens = open_array(path, dtype, self.num_tokens, nbytes=self.file_nbytes, offset=self.header_nbytes)
        assert isinstance(tokens, np.ndarray)
        return tokens

    def open_index(self, path: str) -> NDArray[np.uint8]:
        """The bytes of the index, mapped."""
        count = self.file_nbytes - self.index_offset
        index = open_array(path, np.dtype(np.uint8), count, nbytes=self.file_nbytes, offset=self.index_offset)
        assert isinstance(index, np.ndarray)
        return index


def encode_header(data_nbytes: int, token_nbytes: int) -> bytes:
    """The header of the current generation."""
    return data_nbytes.to_bytes(_LENGTH_NBYTES, "little") + token_nbytes.to_bytes(4, "little")


def framings(path: str) -> list[Framing]:
    """The ways to take a file for a ``.pbin``, newest first: none for other files, one for nearly every real one.

    Costs a few reads.

    Raises:
        FormatError: it is no regular file.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        if size <= _LENGTH_NBYTES or os.pread(fd, 1, size - 1) != b".":
            return []
        return [each for each in _that_fit(os.pread(fd, HEADER_NBYTES, 0), size) if _has_index(fd, each)]


def find_framing(path: str) -> list[Framing]:
    """The same, at least one.

    Raises:
        FormatError: none; says what was found.
        OSError: it cannot be read.
    """
    if found := framings(path):
        return found
    with open_regular(path) as file:
        head = file.read(HEADER_NBYTES)
        size = file.seek(0, os.SEEK_END)
    raise FormatError(f"{path}: no .pbin of any generation: {_why_not(head, size)}")


def _that_fit(head: bytes, size: int) -> list[Framing]:
    """Framings whose header is believable in a file of this size."""
    found = []
    for byte_order, header_nbytes in (("little", HEADER_NBYTES), ("big", HEADER_NBYTES), ("big", _LENGTH_NBYTES)):
        order: ByteOrder = "little" if byte_order == "little" else "big"
        data_nbytes = int.from_bytes(head[:_LENGTH_NBYTES], order)
        token_nbytes = int.from_bytes(head[_LENGTH_NBYTES:], order) if header_nbytes == HEADER_NBYTES else 4
        # A pickle takes at least a byte to begin and one to stop.
        if token_nbytes in _TOKEN_NBYTES and not data_nbytes % token_nbytes and header_nbytes + data_nbytes < size - 1:
            found.append(Framing(order, header_nbytes, token_nbytes, data_nbytes, size))
    return found


def _has_index(fd: int, framing: Framing) -> bool:
    return os.pread(fd, 2, framing.index_offset).startswith(LIST_HEADS)


def _why_not(head: bytes, size: int) -> str:
    if len(head) < HEADER_NBYTES:
        return f"{size} bytes, a header alone has {HEADER_NBYTES}; the file was cut short or is something else"
    little, big = (int.from_bytes(head[:_LENGTH_NBYTES], order) for order in ("little", "big"))
    token_nbytes = min(int.from_bytes(head[_LENGTH_NBYTES:], order) for order in ("little", "big"))
    if little == 0:
        return "its header says no data, though some follows: its writer was stopped before the end; make it again"
    if token_nbytes == 3:
        return (
            "tokens of 3 bytes, which a few versions of Modalities wrote in December 2024 and none reads;"
            " make it again with a current one"
        )
    return (
        f"its header would say {little} bytes of data (little-endian) or {big} (big-endian), in tokens of"
        f" {token_nbytes} bytes; expected 1, 2 or 4, and a pickled index between there and the end of {size} bytes;"
        " the file was cut short or is something else"
    )
