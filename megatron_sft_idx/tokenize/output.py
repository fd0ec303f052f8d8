"""Where a verb writes its shards: at a local prefix, or by way of a local folder at a remote one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packs.buckets import STAGING, StagedOutput
from megatron_sft_idx.packs.transfer import shard_nbytes
from megatron_sft_idx.shard.prefix import places_of
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.progress import shown
from megatron_sft_idx.storage.publish import Place, check_lock, require_apart, require_space
from megatron_sft_idx.tokenize.gather import output_prefixes

__all__ = ["Output"]

_ROLE = "the output"


class Output:
    """The prefix a verb writes: local as it is, remote by way of a local folder.

    Args:
        prefix: as the user gave it.
        shards: how many the output is cut into.
        valid: there is one for validation too.
        staging: the local folder for a remote prefix.
        overwrite: replace what is there.
        summary: a JSON file that is written too.

    Attributes:
        local: to build at.
    """

    def __init__(
        self,
        prefix: str,
        *,
        shards: int = 1,
        valid: bool = False,
        staging: str = STAGING,
        overwrite: bool = False,
        summary: str | None = None,
    ) -> None:
        self.prefix, self._summary = prefix, summary
        self._suffixes = output_prefixes("", shards, valid=valid)
        self._staged = StagedOutput(prefix, staging, overwrite=overwrite) if is_remote(prefix) else None
        self.local = self._staged.local if self._staged else prefix

    def prepare(
        self,
        reads: Iterable[Place],
        *,
        beside: Sequence[str] = (),
        columns: Iterable[str] = (),
        resume: bool = False,
        nbytes: int = 0,
    ) -> None:
        """Before the work: SFTIndexError where it could not be published in the end.

        Args:
            reads: the files that the verb reads.
            beside: what else is written, by what is added to the prefix.
            columns: that the shards will have.
            resume: it may go on with what an earlier run left.
            nbytes: what will be written at least, where nothing of it is there.
        """
        local = ShardPaths.of(self.local).prefix
        if len(self._suffixes) > 1:
            check_lock(f"{local}-parts.journal", ())
        ends = (*self._suffixes, *beside)
        shards = [ShardPaths.of(self.local + end).with_columns(columns) for end in ends]
        writes = [place for each in shards for place in places_of(each, _ROLE, written=True)]
        if self._summary is not None:
            writes.append(Place(self._summary, "--summary"))
        require_apart(writes, reads)
        if not resume:
            require_space(self.local, nbytes, (len(SUFFIXES) + 1) * len(ends))
        if self._staged:
            self._staged.prepare(self._suffixes, resume=resume)
            print(f"building at {self.local}, to be uploaded to {self.prefix}", file=sys.stderr, flush=True)

    def publish(self, *beside: str) -> None:
        """After the work: upload what was built for a remote prefix, and what lies ``beside`` it, by suffix."""
        if self._staged is None:
            return
        suffixes = [*self._suffixes, *beside]
        for done, suffix in enumerate(suffixes):
            try:
                self._upload(self._staged, suffix)
            except (SFTIndexError, KeyboardInterrupt, SystemExit):
                for left in suffixes[done:]:
                    print(
                        f"the shard is built, and kept at {self.local + left}; send it when the store is up again:"
                        f" megatron-sft-idx copy {self.local + left} {self.prefix + left}",
                        file=sys.stderr,
                    )
                raise

    def _upload(self, staged: StagedOutput, suffix: str) -> None:
        with shown(1024)("uploading", shard_nbytes(staged.local + suffix)) as advance:
            staged.publish(suffix, advance)
