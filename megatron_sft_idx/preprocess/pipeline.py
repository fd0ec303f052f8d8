"""Chats in, a packed shard out: tokenise into a corpus, then pack it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_sft_idx.chat.inputs.files import expand_inputs
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.packs.split import refuse_other_splits
from megatron_sft_idx.preprocess.corpus import build_corpus, corpus_report
from megatron_sft_idx.preprocess.distributed import RunFolder, preprocess_on_ray
from megatron_sft_idx.preprocess.encoding import EncodingOptions, RowEncoder
from megatron_sft_idx.preprocess.outputs import output_prefixes
from megatron_sft_idx.preprocess.pack import PackOptions, pack_report, pack_shard
from megatron_sft_idx.preprocess.resume import resume
from megatron_sft_idx.preprocess.start import Job, begin, require_not_output
from megatron_sft_idx.preprocess.summary import Summary, timed
from megatron_sft_idx.preprocess.workers import available_cpus
from megatron_sft_idx.shard import Shard, remove_shard
from megatron_sft_idx.shard.prefix import drop_remains, is_scratch, keep_scratch, read_journal

__all__ = ["PreprocessOptions", "corpus_prefix", "preprocess"]


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """One run.

    Attributes:
        inputs: files, globs and ``save_to_disk`` folders.
        prefix: where the packed shard goes, or what the prefixes of several begin with.
        encoding: rows to sequences.
        packing: sequences to packs.
        engine: ``local`` runs on this machine, ``ray`` on a Ray cluster. Changes no byte of the output.
        ray_address: of the cluster; None starts one on this machine, and stops it.
        workers: tokenising processes; 0 tokenises in this one, None takes all processors. Changes no byte.
        output_shards: how many shards the packs are cut into.
        overwrite: replace what is at the prefix.
        resume: go on with a run that was interrupted, if it was of the same input and options.
        keep_corpus: leave the tokenised corpus beside the packed shard, at ``PREFIX.unpacked``.
        log_interval: rows between two lines of progress where there is no terminal; 0 for silence.
    """

    inputs: Sequence[str]
    prefix: str
    encoding: EncodingOptions
    packing: PackOptions
    engine: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    workers: int | None = 0
    output_shards: int = 1
    overwrite: bool = False
    resume: bool = False
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
    if options.output_shards > 1:
        refuse_other_splits(options.prefix, options.output_shards)
    if options.engine == "ray":
        return preprocess_on_ray(options, log)
    if (parts := RunFolder.of(options.prefix)).exists:
        log(f"{parts.path}: parts of an interrupted run of --engine ray, which are of no use to this one; remove them")
    outputs = output_prefixes(options.prefix, options.output_shards)
    seconds: dict[str, float] = {}
    where = corpus_prefix(options.prefix)
    with timed(seconds, "preparing"):
        files = expand_inputs(options.inputs)
        require_not_output(files, [*outputs, where])
        encoder = RowEncoder(options.encoding)
        job = Job(
            files,
            encoder,
            options.packing,
            options.prefix,
            outputs,
            where,
            options.keep_corpus,
            options.log_interval,
            log,
        )
        start = resume(job) if options.resume else begin(job, overwrite=options.overwrite)
    if start.shards:
        log(f"{options.prefix}: done already, with the same input and options")
        _end_corpus(where, keep=options.keep_corpus)
        report, packing = corpus_report(start.shards[0]), pack_report(start.shards)
        return Summary(options.prefix, options.packing.capacity, report, packing, seconds, found=True)
    with timed(seconds, "tokenising"):
        if start.run is not None:
            workers = available_cpus() if options.workers is None else options.workers
            report = build_corpus(
                start.run, files, encoder, workers=workers, log_interval=options.log_interval, log=log
            )
        else:
            assert start.corpus is not None
            report = corpus_report(start.corpus.header)
    with timed(seconds, "packing"):
        try:
            packing = pack_shard(
                start.corpus or Shard(where),
                options.prefix,
                options.packing,
                shards=options.output_shards,
                overwrite=start.overwrite,
                keep=options.resume,
                log_interval=options.log_interval,
            )
        except (SFTIndexError, OSError, KeyboardInterrupt, SystemExit):
            log(f"the tokenised corpus is kept at {where}; the next run with the same input goes on from it")
            raise
    _end_corpus(where, keep=options.keep_corpus)
    return Summary(options.prefix, options.packing.capacity, report, packing, seconds)


def _end_corpus(prefix: str, *, keep: bool) -> None:
    """Remove the corpus, unless it is to be kept, or is one that a run was told to keep, or no run's at all."""
    paths = ShardPaths.of(prefix)
    if (head := read_journal(paths)) is not None and head.work == "removal":
        drop_remains(paths)  # an earlier run was killed over it
    elif is_scratch(paths):
        (keep_scratch if keep else remove_shard)(paths)
