"""``.pbin`` files of every generation, written without the package's own writer, and a function to read them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

from megatron_sft_idx.formats.pbin import Reader


class Layout(NamedTuple):
    """The differences between the generations."""

    byte_order: Literal["big", "little"]
    has_token_size: bool
    first_offset: int


LAYOUTS = {
    1: Layout("big", False, 8),
    2: Layout("big", True, 12),
    3: Layout("little", True, 12),
    4: Layout("little", True, 0),
}


def pbin_of(
    documents: Sequence[Sequence[int]], *, generation: int = 4, token_nbytes: int = 2, protocol: int | None = None
) -> bytes:
    """Return the file. Generation 1 always has tokens of 4 bytes."""
    layout = LAYOUTS[generation]
    token_nbytes = token_nbytes if layout.has_token_size else 4
    data, index = b"", []
    for document in documents:
        raw = b"".join(token.to_bytes(token_nbytes, layout.byte_order) for token in document)
        index.append((layout.first_offset + len(data), len(raw)))
        data += raw
    return header_of(len(data), generation=generation, token_nbytes=token_nbytes) + data + pickle.dumps(index, protocol)


def header_of(data_nbytes: int, *, generation: int = 4, token_nbytes: int = 2) -> bytes:
    """Return the header, 8 or 12 bytes."""
    layout = LAYOUTS[generation]
    header = data_nbytes.to_bytes(8, layout.byte_order)
    return header + token_nbytes.to_bytes(4, layout.byte_order) if layout.has_token_size else header


def merged(files: Sequence[bytes], *, generation: int = 4, token_nbytes: int = 2) -> bytes:
    """Join files like Modalities' merge tool, including its error: the index loses 12 bytes per file."""
    header_nbytes = len(header_of(0, generation=generation))
    data, index, shift = b"", [], 0
    for file in files:
        data_nbytes = int.from_bytes(file[:8], LAYOUTS[generation].byte_order)
        data += file[header_nbytes : header_nbytes + data_nbytes]
        own = pickle.loads(file[header_nbytes + data_nbytes :])
        index += [(offset + shift, nbytes) for offset, nbytes in own]
        shift += data_nbytes - 12
    return header_of(len(data), generation=generation, token_nbytes=token_nbytes) + data + pickle.dumps(index)


def flat(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def documents_of(path: str, **options: Any) -> list[list[int]]:
    """Read documents by number and in runs, check that they agree, and check masks and boundaries."""
    reader = Reader(path, mask_rule="all", **options)
    documents = []
    for number in range(len(reader)):
        pack = reader.read(number)
        length = len(pack["input_ids"])
        assert pack["seq_boundaries"].tolist() == [0, length]
        assert pack["loss_mask"].tolist() == [1] * (length - 1) + [0]
        assert pack["input_ids"].dtype == reader.spec.token_dtype
        assert pack["input_ids"].dtype.byteorder == "="
        assert not pack["input_ids"].flags.writeable
        documents.append(pack["input_ids"].tolist())
    runs = list(reader.runs())
    lengths = [int(length) for run in runs for length in run.pack_lengths]
    assert lengths == list(map(len, documents))
    assert [id_ for run in runs for id_ in run.tokens.tolist()] == flat(documents)
    assert [bit for run in runs for bit in run.loss_mask.tolist()] == [
        bit for document in documents for bit in [1] * (len(document) - 1) + [0]
    ]
    assert all((run.pack_sequences == 1).all() and not run.seq_starts.any() for run in runs)
    spec = reader.spec
    assert (spec.num_packs, spec.num_sequences, spec.num_tokens) == (len(documents), len(documents), sum(lengths))
    assert spec.longest_pack == max(lengths, default=0)
    return documents
