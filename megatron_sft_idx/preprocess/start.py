"""Where a run begins: with an empty corpus, or with one that an earlier run of the same input made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from megatron_sft_idx.chat.inputs.files import InputFile
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.preprocess.corpus import CorpusRun
from megatron_sft_idx.preprocess.encoding import RowEncoder
from megatron_sft_idx.preprocess.identity import corpus_differences
from megatron_sft_idx.preprocess.pack import PackOptions
from megatron_sft_idx.preprocess.source import Source
from megatron_sft_idx.shard import Shard, ShardWriter, check_free, remove_remains
from megatron_sft_idx.shard.prefix import is_scratch

__all__ = ["Job", "Start", "begin", "begin_anew", "find_corpus", "has_remains", "require_not_output", "require_room"]


class Job(NamedTuple):
    """What a run is of.

    Attributes:
        files: the input.
        encoder: rows to sequences.
        packing: sequences to packs.
        prefix: of the packed shard, or what the prefixes of several begin with.
        outputs: prefixes of the packed shards.
        corpus: prefix of the tokenised corpus.
        keep_corpus: whether that is a result too.
        log_interval: see ``PreprocessOptions``.
        log: takes lines for people.
    """

    files: Sequence[InputFile]
    encoder: RowEncoder
    packing: PackOptions
    prefix: str
    outputs: Sequence[str]
    corpus: str
    keep_corpus: bool
    log_interval: int
    log: Callable[[str], None]


class Start(NamedTuple):
    """What there is to go on with: one of the first three.

    Attributes:
        run: a corpus in the making, empty or half made.
        corpus: the finished corpus.
        shards: the headers of all packed shards: nothing is left to do.
        overwrite: whether the packed shards may replace what is at their prefixes.
    """

    run: CorpusRun | None = None
    corpus: Shard | None = None
    shards: Sequence[Header] = ()
    overwrite: bool = False


def begin(job: Job, *, overwrite: bool) -> Start:
    """Begin a run that does not go on with an interrupted one; a finished corpus of the same input serves it.

    Raises:
        FormatError: something is in the way and may not be replaced.
    """
    for prefix in job.outputs:
        check_free(ShardPaths.of(prefix), overwrite=overwrite)
    for prefix in (job.corpus, *job.outputs):
        if not overwrite and has_remains(prefix):
            raise FormatError(
                f"{ShardPaths.of(prefix).journal}: left by a run that was interrupted, or is at work still; pass"
                " --resume to go on with it, or --overwrite to start anew"
            )
    corpus = find_corpus(job, overwrite=overwrite)
    if corpus is None:
        require_room(job, overwrite=overwrite)
        return Start(run=begin_anew(job, overwrite=overwrite), overwrite=overwrite)
    remove_remains(job.corpus)
    return Start(corpus=corpus, overwrite=overwrite)


def begin_anew(job: Job, *, overwrite: bool) -> CorpusRun:
    """An empty corpus, whose journal says what it is made of, how it is to be packed, and what that may replace."""
    encoder = job.encoder
    writer = ShardWriter(
        job.corpus,
        token_dtype=encoder.token_dtype,
        pad_id=encoder.tokenizer.pad_id,
        overwrite=overwrite,
        metadata=encoder.describe(),
        scratch=not job.keep_corpus,
    )
    run = CorpusRun(writer, Source(job.files))
    inputs = [[file.path, file.num_bytes] for file in job.files]
    run.mark(inputs=inputs, overwrite=overwrite, packing=asdict(job.packing))
    return run


def find_corpus(job: Job, *, overwrite: bool) -> Shard | None:
    """The corpus an earlier run left, if it is what this run would make.

    Raises:
        FormatError: it is another one, and ``overwrite`` is False; says what differs.
    """
    if ShardPaths.of(job.corpus).missing():
        return None
    shard = Shard(job.corpus)
    differs = corpus_differences(shard.header, job.encoder, job.files)
    if not differs:
        return shard
    if overwrite:
        return None
    raise FormatError(
        f"{job.corpus}: a tokenised corpus is here, made from something else: {'; '.join(differs)};"
        + (
            " pass --overwrite to replace it"
            if job.keep_corpus or is_scratch(ShardPaths.of(job.corpus))
            else " move it away, or choose another --output-prefix"
        )
    )


def require_room(job: Job, *, overwrite: bool) -> None:
    """FormatError where a shard is in the place of the corpus that no run made for itself."""
    paths = ShardPaths.of(job.corpus)
    check_free(paths, overwrite=overwrite)
    if paths.present() and not job.keep_corpus and not is_scratch(paths):
        raise FormatError(
            f"{job.corpus}: a shard is here that is not of this run, where its tokenised corpus would be for a while;"
            " move it away, choose another --output-prefix, or pass --keep-corpus to have it replaced"
        )


def has_remains(prefix: str) -> bool:
    """Whether a build was interrupted here, or is at work."""
    paths = ShardPaths.of(prefix)
    return os.path.lexists(paths.journal) and not is_scratch(paths)


def require_not_output(files: Sequence[InputFile], prefixes: Sequence[str]) -> None:
    """FormatError where a file of the input is one of a shard at these prefixes."""
    outputs = {os.path.realpath(path) for prefix in prefixes for path in ShardPaths.of(prefix).all}
    for file in files:
        if os.path.realpath(file.path) in outputs:
            raise FormatError(
                f"{file.path}: is an input, and would be replaced by the output; choose another --output-prefix"
            )
