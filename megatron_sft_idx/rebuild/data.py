"""The three data files of a shard whose header is lost: their dtypes, and what can be counted in them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import MASK_DTYPES, TOKEN_DTYPES, ShardPaths
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.rebuild.packs import Starts, pieces
from megatron_sft_idx.rebuild.watch import Advance
from megatron_sft_idx.shard.index import PackChunk
from megatron_sft_idx.storage import Array, open_array

__all__ = ["DataFiles", "dtypes_by_size"]

_STAGE_TOKENS = 1 << 16


def dtypes_by_size(
    paths: ShardPaths, token_dtype: np.dtype[Any] | None, mask_dtype: np.dtype[Any] | None
) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The dtypes of ``.bin`` and ``.loss.bin``.

    Their sizes alone tell them, since a token takes 2 or 4 bytes and its mask 1 or 4, and all four ratios differ. Only
    of empty files nothing is known.

    Args:
        paths: of the shard.
        token_dtype: where it is known, by ``.idx`` or from the user.
        mask_dtype: where the user said.

    Raises:
        FormatError: the sizes fit no pair of dtypes, or not the known ones, or more than one pair.
    """
    tokens_nbytes, loss_nbytes = os.stat(paths.tokens).st_size, os.stat(paths.loss).st_size
    fitting = [
        (tokens, mask)
        for tokens in TOKEN_DTYPES.values()
        for mask in MASK_DTYPES.values()
        if tokens_nbytes % tokens.itemsize == 0
        and tokens_nbytes // tokens.itemsize * mask.itemsize == loss_nbytes
        and token_dtype in (None, tokens)
        and mask_dtype in (None, mask)
    ]
    if len(fitting) == 1:
        return fitting[0]
    sizes = f"{paths.prefix}: .bin has {tokens_nbytes} bytes, .loss.bin {loss_nbytes}"
    if fitting:
        raise FormatError(f"{sizes}, which says nothing of their dtypes; pass --token-dtype and --mask-dtype")
    asked = " and ".join(f"{what} {dtype}" for what, dtype in (("tokens", token_dtype), ("masks", mask_dtype)) if dtype)
    expected = asked or "uint16 or int32 tokens with uint8 or float32 masks"
    raise FormatError(f"{sizes}, which do not go together as {expected} (rule F2); restore the one that was cut short")


class DataFiles:
    """Tokens, masks and starts, read in pieces."""

    def __init__(self, paths: ShardPaths, token_dtype: np.dtype[Any], mask_dtype: np.dtype[Any]) -> None:
        nbytes, loss_nbytes = os.stat(paths.tokens).st_size, os.stat(paths.loss).st_size
        self.num_tokens = nbytes // token_dtype.itemsize
        self.prefix, self.token_dtype, self.mask_dtype = paths.prefix, token_dtype, mask_dtype
        self.tokens: Array = open_array(paths.tokens, token_dtype, self.num_tokens, nbytes=nbytes, backend="pread")
        self.loss: Array = open_array(paths.loss, mask_dtype, self.num_tokens, nbytes=loss_nbytes, backend="pread")
        self.starts = Starts(paths.starts)

    def measure(
        self, packs: Iterable[PackChunk], *, capacity: int | None, sequence_multiple: int, advance: Advance
    ) -> _native.PackStage:
        """Hold every pack against the rules of FORMAT.md; returns the counts of all of them.

        Raises:
            FormatError: a pack breaks a rule, or together they have not as many tokens as ``.bin``, so the files are
                not of one shard or one of them is damaged.
        """
        stage = _native.PackStage(
            self.token_dtype, self.mask_dtype, capacity or MAX_CAPACITY, sequence_multiple, _STAGE_TOKENS
        )
        for piece in pieces(packs):
            starts = self.starts.array[piece.sequences].astype(np.int64)
            tokens, loss = self.tokens[piece.tokens], self.loss[piece.tokens]
            try:
                stage.add(tokens, loss, starts, piece.packs.lengths, piece.packs.sequences, False)
            except ValueError as error:
                what = str(error).split(";", maxsplit=1)[0]
                raise FormatError(
                    f"{self.prefix}: {what}; the files are not of one shard, or one of them is damaged: restore it"
                ) from None
            stage.clear()
            advance(len(tokens))
        if stage.num_tokens != self.num_tokens:
            raise FormatError(
                f"{self.prefix}: .bin has {self.num_tokens} tokens, the packs by the index {stage.num_tokens}; they"
                " are not of one shard, or one of them is damaged: restore it"
            )
        return stage
