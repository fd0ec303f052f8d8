"""Chats in, a packed shard out: tokenise into a corpus, then pack it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_sft_idx.chat.inputs.files import expand_inputs
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.preprocess.corpus import build_corpus, corpus_report, find_corpus
from megatron_sft_idx.preprocess.encoding import EncodingOptions, RowEncoder
from megatron_sft_idx.preprocess.pack import PackOptions, pack_shard
from megatron_sft_idx.preprocess.summary import Summary
from megatron_sft_idx.shard import Shard, check_free, remove_shard

__all__ = ["PreprocessOptions", "corpus_prefix", "preprocess"]


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """One run.

    Attributes:
        inputs: files, globs and ``save_to_disk`` folders.
        prefix: where the packed shard goes.
        encoding: rows to sequences.
        packing: sequences to packs.
        workers: tokenising processes; 0 tokenises in this one. Changes no byte of the output.
        overwrite: replace what is at the prefix.
        keep_corpus: leave the tokenised corpus beside the packed shard, at ``PREFIX.unpacked``.
        log_interval: rows between two lines of progress where there is no terminal; 0 for silence.
    """

    inputs: Sequence[str]
    prefix: str
    encoding: EncodingOptions
    packing: PackOptions
    workers: int = 0
    overwrite: bool = False
    keep_corpus: bool = False
    log_interval: int = 0


def corpus_prefix(prefix: str) -> str:
    """Where the tokenised corpus of a packed shard lies."""
    return prefix + ".unpacked"


def preprocess(options: PreprocessOptions, log: Callable[[str], None] = lambda line: None) -> Summary:
    """Make the packed shard; see ``PreprocessOptions``.

    The tokenised corpus is kept when packing fails, and a later run with the same input and encoding goes on from it.

    Raises:
        SFTIndexError: an input, a row, an option, or something in the way at the prefix.
        OSError: the disk says no.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "preparing"):
        files = expand_inputs(options.inputs)
        encoder = RowEncoder(options.encoding)
        check_free(ShardPaths.of(options.prefix), overwrite=options.overwrite)
        where = corpus_prefix(options.prefix)
        corpus = find_corpus(where, encoder, files, overwrite=options.overwrite)
    with _timed(seconds, "tokenising"):
        if corpus is None:
            report = build_corpus(
                files,
                encoder,
                where,
                workers=options.workers,
                log_interval=options.log_interval,
                overwrite=options.overwrite,
                log=log,
            )
            corpus = Shard(where)
        else:
            report = corpus_report(corpus)
    with _timed(seconds, "packing"):
        try:
            packing = pack_shard(
                corpus,
                options.prefix,
                options.packing,
                overwrite=options.overwrite,
                log_interval=options.log_interval,
            )
        except (SFTIndexError, OSError):
            log(f"the tokenised corpus is kept at {where}; the next run with the same input goes on from it")
            raise
    if not options.keep_corpus:
        remove_shard(ShardPaths.of(where))
    return Summary(options.prefix, options.packing.capacity, report, packing, seconds)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    seconds[stage] = time.monotonic() - begin
