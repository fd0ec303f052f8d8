"""``rebuild --accept-contents``: write a damaged shard again with its present contents, and mark this in its header.

Checksums show that a file was changed, but not how. If no copy is left, the user may accept the present contents. The
shard is then written again with new checksums, if its contents keep every rule of packs and columns. The entry
``accepted`` of its JSON block lists the changed files, with the checksums that they should have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_sft_idx.check.rules import Finding
from megatron_sft_idx.check.verify import Report
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.doubts import ACCEPTED
from megatron_sft_idx.layout.files import MEDIA_ENTRY
from megatron_sft_idx.packs.merge import begin_copy
from megatron_sft_idx.packs.provenance import SPLIT
from megatron_sft_idx.packs.run import COPIED_TOKENS, nbytes_of_run, nbytes_to_check, windows
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage.progress import Watch

# The name of this work in build.json. After an interruption, the same command starts over.
ACCEPT = "rebuild --accept-contents"
# Rules about checksums of contents, and about counts of contents.
_CHECKSUMS, _COUNTS = ("F3", "C7"), ("H9",)


def accepted_findings(report: Report) -> dict[str, Finding]:
    """Return the files whose contents do not match their checksums, by path.

    FormatError: a full verification found another error, which new checksums cannot fix.
    """
    paths = ShardPaths.of(report.prefix)
    # The offsets in .seq.idx give the positions of packs. Without them there is no content to accept.
    of_contents = [each for each in report.findings if each.rule in _CHECKSUMS and each.path != paths.seq_idx]
    wrong = {finding.path: finding for finding in of_contents}
    ignored = {*of_contents, *(finding for finding in report.findings if finding.rule in _COUNTS)}
    if paths.idx in wrong:  # it is made again from the offsets
        ignored |= {finding for finding in report.findings if finding.path == paths.idx}
    others = [finding for finding in report.findings if finding not in ignored]
    if others:
        raise FormatError(
            f"{others[0].where}: {others[0].what}: contents that break a rule cannot be accepted; {others[0].remedy}"
        )
    return wrong


def write_accepted(paths: ShardPaths, header: Header, wrong: Mapping[str, Finding], watch: Watch) -> Header:
    """Write the shard at ``paths`` again in its place, with its present contents; ``wrong`` are the changed files.

    The old shard stays until the new one is complete. Returns the new header.

    Raises:
        FormatError: another writer is active, or a file has changed since it was verified.
        SequenceError: the contents break a rule of packs or columns.
        OSError: an error of the disk.
    """
    shard = Shard(paths.prefix, backend="pread")
    columns = dict(shard.columns)
    metadata: dict[str, Any] = {
        key: value for key, value in header.metadata.items() if key not in (SPLIT, "columns", MEDIA_ENTRY)
    }
    # Earlier entries stay: they describe other damage to the same contents.
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
