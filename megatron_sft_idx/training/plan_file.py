"""Packing plans as files: one process plans at start-up and publishes the complete file, which all processes map.

``sft-plan-KEY.bin`` is a JSON header padded with spaces to 4096 bytes, followed by the concatenated arrays of
``PlacedPlan``, little-endian. KEY is a hash of the shards' ids, the range and all packing options. A file never becomes
stale, because other data or options result in another name.
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
    """A packing plan with the location of each sequence, in the order of the packs.

    Attributes:
        most_sequences: the maximum number of sequences in a pack.
        raw: uint8, the concatenated bytes of all following arrays.
        offsets: int64 [packs + 1], CSR: pack i holds the entries offsets[i] to offsets[i + 1] of the other arrays.
        starts: int64 [sequences], position of the first token in the token file of the shard.
        lengths: int32 [sequences], in tokens.
        shards: int32 [sequences], number of the shard.
        sequences: int64 [sequences], number of the sequence in its shard; [0] if the plan is not ``numbered``.
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
        """Return a plan of this size as views of ``raw``, or with new arrays that the caller must fill.

        ``numbered``: the plan has the numbers of sequences in their shards. ValueError: ``raw`` has another size.
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
    """Return the path of the file of a plan."""
    return os.path.join(folder, f"sft-plan-{key}.bin")


def load_or_make(folder: str | None, key: str, make: Callable[[], PlacedPlan]) -> PlacedPlan:
    """Return the plan of a key: read it from its file, or make it and publish the file if there is a folder.

    While one process makes a plan, others wait for a file lock, which is released if its holder ends. There must be no
    ``torch.distributed`` barrier here: Megatron's builder lets rank 0 build while the other ranks wait at a barrier of
    the builder, and a barrier that only rank 0 enters here would be matched with that one.

    If the folder is not writable, there is a warning instead of an error, and each process makes its own plan. An error
    on one rank would leave the others waiting at the builder's barrier.

    Args:
        folder: folder of the plans' files; None for no files.
        key: the hash in the name of the plan's file.
        make: makes the plan.

    Raises:
        FormatError: the file is truncated or has another revision.
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
            # Some network file systems have no locks. There a plan may be made twice; the first file is kept.
            logger.info("%s: no lock (%s); continuing without one", path, error)
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
            if not os.path.exists(path):  # without locks, another process may have been faster
                logger.warning(
                    "%s: the packing plan cannot be cached (%s), so every process computes the plan itself; set"
                    " path_to_cache (--data-cache-path) to a writable folder",
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
            f"{path}: not a packing plan, or truncated ({error}); remove the file, and it will be created again"
        ) from None
