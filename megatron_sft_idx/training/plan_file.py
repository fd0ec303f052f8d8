"""Packing plans as files: what training plans when it starts is made once, published whole, and mapped by everyone.

``sft-plan-KEY.bin`` is a JSON header padded with spaces to 4096 bytes, then the arrays of ``PlacedPlan`` end to end,
little-endian. KEY is a hash over the shards' ids, the range and all packing options, so a file never goes stale: other
data or options have another name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.lines import get_logger, shown_by_fields
from megatron_sft_idx.shard.shard_set import running_sums
from megatron_sft_idx.storage import open_array, open_regular
from megatron_sft_idx.storage.publish import Kind, head_of, lock_file, new_control_file

logger = get_logger(__name__)

_REVISION = 1
_HEADER_NBYTES = 4096
_BEGIN = b'{"revision":'
_KIND = Kind("a packing plan", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)


@shown_by_fields
class PlacedPlan(NamedTuple):
    """A plan of packs that says where each sequence lies, in the order of the packs.

    Attributes:
        most_sequences: the most sequences in a pack.
        raw: uint8, the bytes of all following arrays end to end.
        offsets: int64 [packs + 1], CSR: pack i holds the entries offsets[i] to offsets[i + 1] of the other arrays.
        starts: int64 [sequences], position of the first token in the token file of the shard.
        lengths: int32 [sequences], in tokens.
        shards: int32 [sequences], number of the shard.
        sequences: int64 [sequences], number of the sequence in its shard; [0] where the plan is not ``numbered``.
    """

    most_sequences: int
    raw: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    shards: NDArray[np.int32]
    sequences: NDArray[np.int64]

    @classmethod
    def of(
        cls, packs: int, sequences: int, most_sequences: int, numbered: bool, raw: NDArray[np.uint8] | None = None
    ) -> PlacedPlan:
        """A plan of so many packs and sequences: the one in ``raw``, or one whose arrays the caller must fill.

        ``numbered`` is whether it has the numbers of sequences in their shards. ValueError: ``raw`` has another size.
        """
        counts = (packs + 1, sequences, sequences, sequences, sequences if numbered else 0)
        dtypes = [np.dtype(code) for code in ("<i8", "<i8", "<i4", "<i4", "<i8")]
        ends = running_sums(count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True)).tolist()
        if raw is None:
            raw = np.empty(ends[-1], np.uint8)
        if len(raw) != ends[-1]:
            raise ValueError(f"{len(raw)} bytes of arrays, expected {ends[-1]}")
        bounds = zip(itertools.pairwise(ends), dtypes, strict=True)
        return cls(most_sequences, raw, *(raw[begin:end].view(dtype) for (begin, end), dtype in bounds))


def plan_path(folder: str, key: str) -> str:
    """The path of a plan's file."""
    return os.path.join(folder, f"sft-plan-{key}.bin")


def load_or_make(folder: str | None, key: str, make: Callable[[], PlacedPlan]) -> PlacedPlan:
    """The plan of a key: read from its file where that is there, else made, and published where there is a folder.

    While one process makes a plan, others wait for a file lock, which ends with the process that holds it. There must
    be no ``torch.distributed`` barrier here: Megatron's builder lets rank 0 build while the others wait at a barrier of
    its own, and another barrier on rank 0 alone would be taken for that one.

    A folder that cannot be written is no error but a warning, and each process makes the plan for itself: an error on
    one rank would leave the others waiting at that barrier.

    Args:
        folder: of plans; None for none.
        key: the hash that names the plan.
        make: makes the plan.

    Raises:
        FormatError: the file was cut short or is of another revision.
    """
    if folder is None:
        return make()
    path = plan_path(folder, key)
    if os.path.exists(path):
        return _load(path)
    with contextlib.ExitStack() as held:
        try:
            os.makedirs(folder, exist_ok=True)
            held.callback(os.close, lock_file(path + ".lock", (b"",), create=True, busy=None))
        except (OSError, FormatError) as error:
            # Some network file systems have no locks. There a plan may be made twice, and the first file stays.
            logger.info("%s: no lock (%s); going on without", path, error)
        if os.path.exists(path):
            return _load(path)
        plan = make()
        fields = {
            "revision": _REVISION,
            "packs": len(plan.offsets) - 1,
            "sequences": len(plan.starts),
            "most_sequences": plan.most_sequences,
            "numbered": len(plan.sequences) > 0,
        }
        try:
            with new_control_file(path, _KIND, overwrite=False) as new:
                with contextlib.closing(new.open()) as file:
                    file.write(json.dumps(fields).encode().ljust(_HEADER_NBYTES))
                    file.write(plan.raw.data)
                new.publish()
        except (OSError, FormatError) as error:
            if not os.path.exists(path):  # without locks another process may have been faster
                logger.warning(
                    "%s: the packing plan cannot be cached (%s), so every process packs for itself; name a folder that"
                    " can be written: path_to_cache (--data-cache-path)",
                    path,
                    error,
                )
                return plan
    return _load(path)


def _load(path: str) -> PlacedPlan:
    try:
        with open_regular(path) as file:
            fields = json.loads(file.read(_HEADER_NBYTES))
        if fields["revision"] != _REVISION:
            raise ValueError(f"of revision {fields['revision']}, expected {_REVISION}")
        packs, sequences, most_sequences = (int(fields[name]) for name in ("packs", "sequences", "most_sequences"))
        if min(packs, sequences, most_sequences) < 0:
            raise ValueError("a count below 0")
        nbytes = os.path.getsize(path)
        raw = open_array(path, np.dtype("u1"), nbytes, nbytes=nbytes)[_HEADER_NBYTES:]
        return PlacedPlan.of(packs, sequences, most_sequences, bool(fields.get("numbered")), raw)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(
            f"{path}: not a packing plan, or cut short ({error}); remove it, and it is made anew"
        ) from None
