"""How a shard's bytes are read: the choices that users have, checked in one place."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, get_args

from megatron_sft_idx.errors import FormatError

__all__ = ["Advice", "Backend", "BackendName", "ReadOptions"]

Backend = Literal["mmap", "pread", "reopen"]
BackendName = Literal["mmap", "os", "pread", "reopen"]  # as users may say it: "os" is another name of "mmap"
Advice = Literal["normal", "sequential", "random"]


class ReadOptions(NamedTuple):
    """How the tokens and masks of a shard, or of several together, are read.

    Attributes:
        backend: ``mmap`` for views of memory maps: nothing is copied, and processes share the pages. ``pread`` where
            mapping is slow or refused. ``reopen`` to hold neither maps nor descriptors. ``mmap`` is the default, being
            several times faster on warm pages.
        advice: what the kernel is told of the order of reads. ``random`` switches its read-ahead off, which makes cold
            reads slower unless what comes is announced (``schedule``), so ``normal`` is the default.
        huge_pages: ask for huge pages for maps. Where a file system has them the kernel reads 2 MiB at a fault: cold
            packs in random order took twice as long, warm ones no less time. So it is off by default.
    """

    backend: Backend = "mmap"
    advice: Advice = "normal"
    huge_pages: bool = False

    @classmethod
    def of(cls, where: str, backend: BackendName | ReadOptions = "mmap", **options: Any) -> ReadOptions:
        """Options as users give them.

        Args:
            where: what is read; errors begin with it.
            backend: a name, or all options.
            options: the other fields.

        Raises:
            FormatError: no such choice; the message lists those there are.
        """
        made = backend if isinstance(backend, ReadOptions) else cls(cast(Backend, backend), **options)
        if cast(str, made.backend) == "os":
            made = made._replace(backend="mmap")
        if cast(str, made.backend) == "process":
            raise FormatError(
                f"{where}: backend 'process' was removed, as reading by pread what is announced is faster: choose pread"
            )
        for what, value, choices in (
            ("backend", made.backend, get_args(BackendName)),
            ("advice", made.advice, get_args(Advice)),
        ):
            if value not in choices:
                raise FormatError(f"{where}: {what} {value!r}, choose one of {', '.join(choices)}")
        return made
