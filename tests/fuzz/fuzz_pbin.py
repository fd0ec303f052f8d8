"""``.pbin`` of any generation: documents are at the offsets of the index, for any interpretation of the bytes."""

from __future__ import annotations

from pathlib import Path

from fuzz.contract import refused, scratch
from fuzz.packed import packs_of
from fuzz.repair import repair_pbin
from pickled_pairs_twin import twin

from megatron_sft_idx.formats.pbin import Reader, read_document_index, recognise


def run(data: bytes) -> None:
    path = scratch("pbin") / "x.pbin"
    for raw in (data, *repair_pbin(data)):
        path.write_bytes(raw)
        recognised = recognise(str(path))
        for repair_merge in (False, True):
            with refused(str(path)):
                reader = Reader(path, mask_rule="all", repair_merge=repair_merge)
                assert recognised
                documents = [ids for ids, _, _ in packs_of(reader)]
                assert documents == _documents(path, raw, repair_merge)
        with refused(str(path)):
            sound = read_document_index(str(path))
            assert not sound.num_moved
            assert not read_document_index(str(path), repair_merge=True).num_moved


def _documents(path: Path, raw: bytes, repair_merge: bool) -> list[list[int]]:
    """Read documents the slow way, token by token."""
    placement = read_document_index(str(path), repair_merge=repair_merge)
    framing = placement.framing
    at, documents = 0, []
    for offset, length in twin(raw[framing.index_offset :]):
        start = at if placement.num_moved else offset - placement.first_offset
        data = raw[framing.header_nbytes + start :][:length]
        tokens = [data[i : i + framing.token_nbytes] for i in range(0, length, framing.token_nbytes)]
        documents.append([int.from_bytes(token, framing.byte_order) for token in tokens])
        at = start + length
    return [document for document in documents if document]
