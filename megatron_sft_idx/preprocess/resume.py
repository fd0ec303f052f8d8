"""Going on with a run that was interrupted, wherever it was.

What it left tells how far it had come: a half made corpus with its journal, a finished corpus, a packed shard that
lacks renames, or all of it. Each is compared with what this run would make, and refused where it differs.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import Any

from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.preprocess.corpus import CorpusRun
from megatron_sft_idx.preprocess.identity import option_differences, packing_differences, shards_differences
from megatron_sft_idx.preprocess.progress import Progress
from megatron_sft_idx.preprocess.source import Source
from megatron_sft_idx.preprocess.start import Job, Start, begin_anew, find_corpus, has_remains, require_room
from megatron_sft_idx.shard import InterruptedBuild, Remains, check_free, find_remains, read_header, recover
from megatron_sft_idx.shard.prefix import is_set_aside, publish_all, read_journal

__all__ = ["resume"]

# About as many, so that lines of progress come as often for either.
_TOKENS_OF_A_ROW = 1000


def resume(job: Job) -> Start:
    """Find where an interrupted run stopped.

    Raises:
        FormatError: it was of another input or other options, and says which; or a living run is at work.
    """
    _finish_forward(job, job.corpus)
    waiting = [paths for prefix in job.outputs if is_set_aside(paths := ShardPaths.of(prefix))]
    if waiting and all(paths in waiting or not paths.missing() for paths in map(ShardPaths.of, job.outputs)):
        # Several shards of a run appear together.
        publish_all(waiting)
        job.log(f"resuming: {job.prefix} was complete but for renames, which are done now")
    for prefix in job.outputs if len(job.outputs) == 1 else ():
        _finish_forward(job, prefix)
    heads = [read_journal(ShardPaths.of(prefix)) for prefix in job.outputs]
    may_replace = any(head is not None and head.content.get("overwrite") is True for head in heads)
    done = [prefix for prefix in job.outputs if not ShardPaths.of(prefix).missing() and not may_replace]
    headers = [read_header(prefix) for prefix in done]
    differs = shards_differences(headers, job.encoder, job.files, job.packing)
    if len(done) == len(job.outputs) and not differs:
        return Start(shards=headers)
    start = None
    if _remains(job.corpus) is not None:
        with InterruptedBuild(job.corpus, overwrite=True) as interrupted:
            # A run that was told to overwrite may go on to; it is the journal that knows.
            replaces = bool(next(interrupted.states(), {}).get("overwrite"))
            if replaces or not any(ShardPaths.of(prefix).present() for prefix in job.outputs):
                start = _go_on(job, interrupted, replaces=replaces)
    if start is not None:
        return start
    if differs:
        raise FormatError(
            f"{done[0]}: a finished shard is here, made from something else: {'; '.join(differs)}; pass --overwrite"
            " to replace it (a tokenised corpus of the same input beside it is used again)"
        )
    for prefix in job.outputs:
        # Those that are done are these very ones, and are kept.
        check_free(ShardPaths.of(prefix), overwrite=prefix in done or may_replace)
    return _after_tokenising(job)


def _after_tokenising(job: Job) -> Start:
    """The corpus is finished, or there is nothing of it."""
    half_made = [prefix for prefix in job.outputs if has_remains(prefix)]
    if (corpus := find_corpus(job, overwrite=False)) is not None:
        for prefix in half_made:
            if (packed := _remains(prefix)) is not None:
                differs = packing_differences(packed.build_options.metadata, job.packing)
                _require_same_options(ShardPaths.of(prefix).journal, differs)
        job.log(f"resuming: the tokenised corpus at {job.corpus} is complete")
        return Start(corpus=corpus, overwrite=bool(half_made))
    if half_made:
        raise FormatError(
            f"{ShardPaths.of(half_made[0]).journal}: left by an interrupted build that is not of this command: there is"
            f" no corpus at {job.corpus}; recover it, or pass --overwrite to start anew"
        )
    job.log(f"{job.prefix}: nothing to resume, starting from the beginning")
    require_room(job, overwrite=has_remains(job.corpus))
    return Start(run=begin_anew(job, overwrite=has_remains(job.corpus)))


def _remains(prefix: str) -> Remains | None:
    """What an interrupted build left here, where its journal has a head; FormatError where a living writer has it."""
    try:
        return find_remains(prefix)
    except CorruptShardError as error:
        if error.rule == "J1":
            return None
        raise


def _finish_forward(job: Job, prefix: str) -> None:
    """Take the renames that are left of a build that was complete; it had leave to replace what it replaces."""
    if (remains := _remains(prefix)) is not None and remains.done:
        recover(prefix, overwrite=True)
        job.log(f"resuming: {prefix} was complete but for renames, which are done now")


def _go_on(job: Job, interrupted: InterruptedBuild, *, replaces: bool) -> Start | None:
    """The half made corpus, once input and options are known to be the same; None where nothing of it is complete."""
    journal = ShardPaths.of(job.corpus).journal
    first = next(interrupted.states(), None)
    differs = option_differences(interrupted.options.metadata, job.encoder)
    _require_same_options(journal, differs or (packing_differences(first, job.packing) if first else []))
    if first is None:
        return None
    if not all(map(_is_state, interrupted.states())) or not _are_inputs(first.get("inputs")):
        raise FormatError(f"{journal}: its marks are not of this command; pass --overwrite to start anew")
    _require_same_files(job, journal, first)
    interval = job.log_interval * _TOKENS_OF_A_ROW
    with Progress("checking", interrupted.num_tokens, unit="tok", log_interval=interval, items="tokens") as progress:
        marks = interrupted.verify(lambda tokens: progress.update(tokens, tokens))
    if not marks:
        return None
    source = Source(job.files)
    last, bad_rows = _require_same_input(job, journal, source, interrupted)
    run = CorpusRun(interrupted.resume(), source)
    run.report.rows, run.report.skipped, run.report.bad_rows = last["rows"], last["skipped"], bad_rows
    run.notes = Counter(last["notes"])
    run.num_bytes, run.num_pieces, run.fingerprint = last["num_bytes"], last["pieces"], source.fingerprint
    job.log(f"resuming after {run.report.rows:,} rows")
    return Start(run=run, overwrite=replaces or any(map(has_remains, job.outputs)))


def _require_same_options(journal: str, differs: list[str]) -> None:
    if differs:
        raise FormatError(
            f"{journal}: the interrupted run had other options: {'; '.join(differs)}; pass the same ones to go on, or"
            " --overwrite to start anew (a finished corpus of the same input is used again)"
        )


def _is_state(state: dict[str, Any]) -> bool:
    """Whether a mark is as ``CorpusRun.mark`` makes it."""
    counts = [state.get(name) for name in ("pieces", "num_bytes", "rows", "skipped")]
    return all(type(count) is int for count in counts) and isinstance(state.get("notes"), dict)


def _are_inputs(value: Any) -> bool:
    """Whether this is a list of paths and sizes."""
    return isinstance(value, list) and all(
        isinstance(file, list) and list(map(type, file)) == [str, int] for file in value
    )


def _require_same_files(job: Job, journal: str, first: dict[str, Any]) -> None:
    """Files are known by their order and size; their content is compared as far as it was used."""
    now = [[file.path, file.num_bytes] for file in job.files]
    for number, (found, wanted) in enumerate(zip_longest(first["inputs"], now), 1):
        if found is None or wanted is None or found[1] != wanted[1]:
            raise FormatError(
                f"{journal}: the interrupted run had other input: file {number} was {_shown(found)}, is"
                f" {_shown(wanted)}; pass the same files to go on, or --overwrite to start anew"
            )


def _shown(file: list[Any] | None) -> str:
    return f"{file[0]} of {file[1]:,} bytes" if file else "none"


def _require_same_input(
    job: Job, journal: str, source: Source, interrupted: InterruptedBuild
) -> tuple[dict[str, Any], list[str]]:
    """Read the input as far as it is done; the last state, and the bad rows of all."""
    bad_rows: list[str] = []
    state: dict[str, Any] = {}
    taken = 0
    total = sum(file.num_bytes for file in job.files)
    with Progress("reading again", total, unit="B", log_interval=job.log_interval, items="rows") as progress:
        for following in interrupted.states():
            before, state = state, following
            bad_rows += state.get("bad_rows", [])
            name = "the input"
            while taken < state["pieces"] and (piece := next(source, None)) is not None:
                source.done()
                taken, name = taken + 1, f"{piece.path}, from row {piece.first} on,"
                progress.update(piece.num_bytes, state["rows"] - before.get("rows", 0))
            if state["pieces"] and source.fingerprint != state.get("fingerprint"):
                raise FormatError(
                    f"{journal}: {name} is not what the interrupted run read; restore it to go on, or pass"
                    " --overwrite to start anew"
                )
    return state, bad_rows
