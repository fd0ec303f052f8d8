"""A packing plan as a file: made once, published whole, memory-mapped by everyone.

``sft-plan-KEY.bin`` is a JSON header padded with spaces to 4096 bytes, then the arrays of ``PlacedPlan`` end to end,
little-endian. KEY is a hash over the shards' ids, the range and all packing options, so a file never goes stale: other
data or options have another name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import open_array, open_regular
from megatron_sft_idx.storage.publish import Kind, head_of, lock_file, new_file

__all__ = ["PlacedPlan", "load_or_make", "plan_path"]

logger = logging.getLogger(__name__)

_REVISION = 1
_HEADER_NBYTES = 4096
_BEGIN = b'{"revision":'
_KIND = Kind("a packing plan", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """Packs as sequences with their places, in the order of the packs.

    Attributes:
        most_sequences: sequences in the pack that has most.
        offsets: int64 [packs + 1], CSR: pack i holds the entries offsets[i] to offsets[i + 1].
        starts: int64 [sequences], first token in the shard's token file.
        lengths: int32 [sequences], tokens.
        shards: int32 [sequences], which shard.
        sequences: int64 [sequences], the number of each in its shard; [0] where the plan is not ``numbered``.
    """

    most_sequences: int
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    shards: NDArray[np.int32]
    sequences: NDArray[np.int64]

    @classmethod
    def empty(cls, packs: int, sequences: int, most_sequences: int, numbered: bool = False) -> PlacedPlan:
        """A plan to be filled in; ``numbered`` where it shall say which sequences of their shards these are."""
        return cls(most_sequences, *(np.empty(count, dtype) for count, dtype in _layout(packs, sequences, numbered)))

    @property
    def num_packs(self) -> int:
        """Rows."""
        return len(self.offsets) - 1


def _layout(packs: int, sequences: int, numbered: bool) -> list[tuple[int, Any]]:
    numbers = sequences if numbered else 0
    return [(packs + 1, "<i8"), (sequences, "<i8"), (sequences, "<i4"), (sequences, "<i4"), (numbers, "<i8")]


def plan_path(folder: str, key: str) -> str:
    """The file of a plan."""
    return os.path.join(folder, f"sft-plan-{key}.bin")


def load_or_make(folder: str | None, key: str, make: Callable[[], PlacedPlan]) -> PlacedPlan:
    """The plan of this key: from its file where there is one, else made and, with a folder, published for everyone.

    Processes that come while one makes the plan wait for a file lock, which ends with the process that holds it. There
    is no ``torch.distributed`` barrier here on purpose: Megatron's builder lets rank 0 build while the others wait at
    a barrier of its own, and one more on rank 0 alone would be taken for that.

    A folder that cannot be written costs a warning and time, not the run: one rank that stops here would leave the
    others waiting at that barrier.

    Raises:
        FormatError: the file was cut short or is of another revision.
    """
    if folder is None:
        return make()
    path = plan_path(folder, key)
    if os.path.exists(path):
        return _load(path)
    with _locked(path + ".lock"):
        if os.path.exists(path):
            return _load(path)
        plan = make()
        try:
            _publish(path, plan)
        except (OSError, FormatError) as error:
            if os.path.exists(path):  # where there are no locks, another process may have been faster
                return _load(path)
            logger.warning(
                "%s: the packing plan cannot be cached (%s), so every process packs for itself; name a folder that"
                " can be written: path_to_cache (--data-cache-path)",
                path,
                error,
            )
            return plan
    return _load(path)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold a lock file, where there can be one."""
    with contextlib.ExitStack() as held:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            held.callback(os.close, lock_file(path, (b"",), create=True, busy=None))
        except (OSError, FormatError) as error:
            # Some network file systems have no locks. Then a plan may be made twice, and the first one stays.
            logger.info("%s: no lock (%s); going on without", path, error)
        yield


def _publish(path: str, plan: PlacedPlan) -> None:
    fields = {
        "revision": _REVISION,
        "packs": plan.num_packs,
        "sequences": len(plan.starts),
        "most_sequences": plan.most_sequences,
        "numbered": len(plan.sequences) > 0,
    }
    with new_file(path, _KIND, overwrite=False) as new:
        with contextlib.closing(new.open()) as file:
            file.write(json.dumps(fields).encode().ljust(_HEADER_NBYTES))
            for array in (plan.offsets, plan.starts, plan.lengths, plan.shards, plan.sequences):
                file.write(array.data)
        new.publish()


def _load(path: str) -> PlacedPlan:
    with open_regular(path) as file:
        raw = file.read(_HEADER_NBYTES)
    try:
        fields = json.loads(raw)
        revision = fields["revision"]
        packs, sequences, most = (int(fields[name]) for name in ("packs", "sequences", "most_sequences"))
        numbered = bool(fields.get("numbered"))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: not a packing plan ({error}); remove it, and it is made anew") from None
    if revision != _REVISION:
        raise FormatError(f"{path}: plan revision {revision}, expected {_REVISION}; remove it, and it is made anew")
    layout = [(count, np.dtype(code)) for count, code in _layout(packs, sequences, numbered)]
    nbytes = _HEADER_NBYTES + sum(count * dtype.itemsize for count, dtype in layout)
    if (found := os.path.getsize(path)) != nbytes:
        raise FormatError(f"{path}: {found} bytes, expected {nbytes}; it was cut short: remove it, and it is made anew")
    whole = open_array(path, np.dtype("u1"), nbytes, nbytes=nbytes)[:]
    arrays, begin = [], _HEADER_NBYTES
    for count, dtype in layout:
        end = begin + count * dtype.itemsize
        arrays.append(whole[begin:end].view(dtype))
        begin = end
    return PlacedPlan(most, *arrays)
