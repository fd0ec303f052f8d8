"""Outputs that may be remote, and inputs that may not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.formats.registry import places
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packs.buckets import STAGING, StagedOutput
from megatron_sft_idx.packs.transfer import shard_nbytes
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.progress import Advance, Progress, Watch
from megatron_sft_idx.storage.publish import Place, check_lock, require_apart, require_space
from megatron_sft_idx.tokenize import output_prefixes

__all__ = ["Output", "add_staging", "local_path", "shown"]

_ROLE = "the output"


def local_path(text: str) -> str:
    """A path on a disk, for what cannot be done inside an object store."""
    try:
        remote = is_remote(text)
    except FormatError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if remote:
        raise argparse.ArgumentTypeError(
            f"{text}: this works on local files; bring the shard here and back with megatron-sft-idx copy SRC DST"
        )
    return text


def add_staging(parser: Any) -> None:
    """Where a shard for an object store is built."""
    parser.add_argument(
        "--staging",
        default=STAGING,
        metavar="DIR",
        help="for s3:// and msc:// prefixes: local folder to build in, with room for it (preprocess: twice);"
        " what an interrupted run or upload left there is gone on with (default: ./%(default)s)",
    )


class Output:
    """The prefix a verb writes: local as it is, remote by way of a local folder.

    Args:
        arguments: with ``output_prefix``, ``staging`` and ``overwrite``.
        shards: how many the output is cut into.

    Attributes:
        prefix: as the user gave it.
        local: to build at.
        shown: what was written, as the user reads it; a glob where it is several shards.
    """

    def __init__(self, arguments: argparse.Namespace, *, shards: int = 1) -> None:
        self.prefix: str = arguments.output_prefix
        self.shown = self.prefix + (f"-*-of-{shards:05d}" if shards > 1 else "")
        self._suffixes = output_prefixes("", shards)
        self._summary: str | None = getattr(arguments, "summary", None)
        self._staged: StagedOutput | None = None
        if is_remote(self.prefix):
            self._staged = StagedOutput(self.prefix, arguments.staging, overwrite=arguments.overwrite)
        self.local = self._staged.local if self._staged else self.prefix

    def prepare(
        self, reads: Iterable[Place], *, beside: Sequence[str] = (), resume: bool = False, nbytes: int = 0
    ) -> None:
        """Before the work: SFTIndexError where it could not be published in the end.

        Args:
            reads: the files that the verb reads.
            beside: what else is written, by what is added to the prefix.
            resume: it may go on with what an earlier run left.
            nbytes: what will be written at least, where nothing of it is there.
        """
        local = ShardPaths.of(self.local).prefix
        if len(self._suffixes) > 1:
            check_lock(f"{local}-parts.journal", ())
        ends = (*self._suffixes, *beside)
        writes = [place for end in ends for place in places(self.local + end, "sft-idx", _ROLE, written=True)]
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


def shown(log_interval: int) -> Watch:
    """Stages of work as a person sees them, in bytes."""

    @contextmanager
    def watch(what: str, total: int) -> Iterator[Advance]:
        with Progress(what, total, unit="B", log_interval=log_interval, items="MiB") as progress:
            yield progress.advance

    return watch
