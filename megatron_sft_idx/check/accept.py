"""``rebuild --accept-contents``: a damaged shard is written again as it is now, and its header says so.

Checksums tell that a file was changed, and not how it was. Where no copy is left, the user may take what is there. The
shard is then written again under checksums of its present contents, if these keep every rule of packs and columns. The
entry ``accepted`` of its JSON block lists the files that had been changed, with the checksums that they should have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_sft_idx.check.rules import Finding
from megatron_sft_idx.check.verify import Report
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import MEDIA_ENTRY
from megatron_sft_idx.packs.merge import begin_copy
from megatron_sft_idx.packs.provenance import SPLIT
from megatron_sft_idx.packs.run import COPIED_TOKENS, nbytes_of_run, nbytes_to_check, windows
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage.progress import Watch

ACCEPTED = "accepted"
# The work of writing a shard again, in build.json. If it is interrupted, the same command begins again.
ACCEPT = "accept"
# Checksums of contents, and counts of contents.
_CHECKSUMS, _COUNTS = ("F3", "C7"), ("H9",)


def accepted_findings(report: Report) -> dict[str, Finding]:
    """The files whose contents do not have their checksums, by path.

    FormatError: a full verification found something else too, which no new checksum makes good.
    """
    paths = ShardPaths.of(report.prefix)
    # The offsets in .seq.idx say where packs are: without them, there is no content to accept.
    of_contents = [each for each in report.findings if each.rule in _CHECKSUMS and each.path != paths.seq_idx]
    wrong = {finding.path: finding for finding in of_contents}
    ignored = {*of_contents, *(finding for finding in report.findings if finding.rule in _COUNTS)}
    if paths.idx in wrong:  # it is made again from the offsets
        ignored |= {finding for finding in report.findings if finding.path == paths.idx}
    others = [finding for finding in report.findings if finding not in ignored]
    if others:
        raise FormatError(
            f"{others[0].path}: byte {others[0].offset}: {others[0].what}: contents that break a rule cannot be"
            f" accepted; {others[0].remedy}"
        )
    return wrong


def write_accepted(paths: ShardPaths, header: Header, wrong: Mapping[str, Finding], watch: Watch) -> Header:
    """Write the shard at ``paths`` again, in its place, with its contents as they are; ``wrong`` are the changed files.

    The old shard stays until the new one is whole. Returns the new header.

    Raises:
        FormatError: another writer is at work, or a file has changed since it was verified.
        SequenceError: the contents break a rule of packs or columns.
        OSError: of the disk.
    """
    shard = Shard(paths.prefix, backend="pread")
    columns = dict(shard.columns)
    metadata: dict[str, Any] = {
        key: value for key, value in header.metadata.items() if key not in (SPLIT, "columns", MEDIA_ENTRY)
    }
    # Earlier entries stay: they name other damage to the same contents.
    earlier = metadata.get(ACCEPTED)
    metadata[ACCEPTED] = [
        *(earlier if isinstance(earlier, list) else []),
        *({"file": path.removeprefix(paths.prefix), "expected": found.expected} for path, found in wrong.items()),
    ]
    like = dataclasses.replace(header, metadata=metadata)
    specs = {name: column.spec for name, column in columns.items()}
    nbytes = nbytes_to_check(shard.files, columns)
    how: dict[str, Any] = {"work": ACCEPT, "overwrite": True, "durable": True, "nbytes": nbytes}
    new = begin_copy(paths.prefix, like, specs, media=shard.media is not None, **how)
    with watch("writing", nbytes) as advance, new as writer:
        for window in windows(shard.files, COPIED_TOKENS, columns, media=shard.media):
            run = window.run()
            writer.add_run(run)
            advance(nbytes_of_run(run))
        return writer.finalize()
