"""A shard from what an interrupted build left: every pack whose journal record and data are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.shard.build import Build
from megatron_sft_idx.shard.prefix import check_free, drop_remains
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.shard.remains import Remains, complete_header, find_remains, read_remains

__all__ = ["Remains", "adopt_remains", "find_remains", "recover", "remove_remains"]


def recover(
    prefix: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> Header:
    """Publish the packs that an interrupted build left at a prefix.

    A build that was complete but for renames is finished, its content as it was meant. Of any other every pack is
    kept whose journal record is complete and whose data is there; rules are checked, counts and checksums taken anew.
    Its header says that it was rebuilt, and its JSON block holds ``recovered``: how many packs there are and how many
    the journal knew of. Memory stays at a few MiB. Until the new shard is complete and synced nothing of the remains
    is removed, so a recovery that is itself killed can be run again.

    Args:
        prefix: the path the five files will share.
        metadata: JSON object for the header; None takes what was known when the build began.
        overwrite: replace a shard that is at the prefix.
        progress: called with the tokens read since the last call.

    Returns:
        The header of the published shard.

    Raises:
        CorruptShardError: the journal's head is torn, or it says that files are complete which are not.
        FormatError: nothing to recover, a living writer, or a shard that may not be replaced.
    """
    paths = ShardPaths.of(prefix)
    try:
        publication = Publication.take_up(paths, overwrite=overwrite)
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal, so there is nothing to recover from it") from None
    try:
        remains = read_remains(paths)
        if remains.done:
            return finish_publication(publication, overwrite=overwrite)
        check_free(paths, overwrite=overwrite)
        build = Build(publication, remains.build_options, remains)
        if not (kept := build.replay(remains.num_packs, progress)):
            raise FormatError(
                f"{paths.journal}: no complete pack had been written yet, so there is nothing to recover;"
                " build it again with overwrite (--overwrite)"
            )
        known = remains.build_options.metadata if metadata is None else metadata
        recovered = {"packs": kept, "packs_in_journal": remains.num_recorded}
        return build.publish({**known, "recovered": recovered}, rebuilt=True)
    finally:
        publication.close()


def finish_publication(publication: Publication, *, overwrite: bool) -> Header:
    """Take the last steps of a build whose journal says DONE."""
    paths = publication.paths
    header = complete_header(paths)
    # .seq.idx is renamed last: while it has its temporary name, the one beside it is of the shard to be replaced.
    if not overwrite and os.path.lexists(paths.temporary(paths.seq_idx)) and os.path.lexists(paths.seq_idx):
        check_free(paths, overwrite=False)
    publication.finish()
    return header


def adopt_remains(paths: ShardPaths) -> None:
    """Let a journal name the temporary files that lie beside it, all of which were copied here.

    Raises:
        FormatError: there is no journal, or a living writer is at work here.
    """
    try:
        Publication.take_up(paths, overwrite=False, copied=True).close()
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal; copy it here with the .tmp files beside it") from None


def remove_remains(prefix: str | os.PathLike[str]) -> None:
    """Remove the journal and the temporary files of an interrupted build; a shard at the prefix stays.

    Raises:
        FormatError: a living writer is at work here.
    """
    drop_remains(ShardPaths.of(prefix))
