"""The exceptions of this package, helpers for their messages, and checks of options against their type hints.

::

    SFTIndexError
    ├── ShardNotFoundError (FileNotFoundError)   some of a shard's five files are missing
    ├── FormatError (ValueError)                 bytes do not match FORMAT.md
    │   ├── UnsupportedVersionError              a version this package does not read
    │   └── CorruptShardError                    path, byte offset and rule
    ├── SequenceError (ValueError)               a row, sequence or pack that cannot be used
    └── StorageError                             a read from or write to an object store failed

Each class exists because a caller may want to handle it differently. Every message starts with the path or the name of
the argument. Then it says what was found and expected, names the rule of FORMAT.md if there is one, and gives a remedy.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

# Number of names to suggest for a name that does not exist.
_MAX_OFFERED = 3


class SFTIndexError(Exception):
    """Base class of every error this package raises on purpose.

    Example:
        >>> from megatron_sft_idx import Shard
        >>> for prefix in ["data/chats", "data/chat"]:
        ...     try:
        ...         print(prefix, "has", len(Shard(prefix)), "packs")
        ...     except SFTIndexError as error:
        ...         print(prefix, "cannot be read:", type(error).__name__)
        data/chats has 7 packs
        data/chat cannot be read: ShardNotFoundError
    """


class ShardNotFoundError(SFTIndexError, FileNotFoundError):
    """Some or all of a shard's five files are missing, or a column.

    Attributes:
        prefix: the path the five files share.
        missing: paths of the missing files.
        remedy: what the user can do about it.

    Example:
        >>> from megatron_sft_idx import Shard
        >>> try:
        ...     Shard("data/chat")
        ... except ShardNotFoundError as error:
        ...     print(error.prefix, "has no shard:", len(error.missing), "files are missing, such as", error.missing[0])
        data/chat has no shard: 5 files are missing, such as data/chat.bin
    """

    def __init__(self, prefix: str, missing: Sequence[str], remedy: str) -> None:
        self.prefix = prefix
        self.missing = list(missing)
        self.remedy = remedy
        super().__init__(prefix, self.missing, remedy)

    def __str__(self) -> str:
        if all(path.endswith(".col") for path in self.missing):
            return f"{self.prefix}: {self.remedy}"
        missing = ", ".join(self.missing) if len(self.missing) < 5 else f"{self.missing[0]} and the other four"
        return f"{self.prefix}: no shard here, missing {missing} (rule F1); {self.remedy}"


class FormatError(SFTIndexError, ValueError):
    """A file, option or shard does not follow the format.

    Example:
        >>> from megatron_sft_idx import Shard
        >>> try:
        ...     Shard("data/chats", backend="fast")
        ... except FormatError as error:
        ...     print(error)
        data/chats: backend 'fast', choose one of mmap, os, pread, reopen
    """


class UnsupportedVersionError(FormatError):
    """A shard of a format version that this package does not read.

    Attributes:
        path: the file with this version.
        found: the version of the file.
        supported: the versions this package reads.

    Example:
        >>> from pathlib import Path
        >>> from megatron_sft_idx import Shard
        >>> header = bytearray(Path("data/chats.seq.idx").read_bytes())
        >>> header[8] = 2  # the version number is at byte 8
        >>> nbytes = Path("data/chats.seq.idx").write_bytes(header)
        >>> try:
        ...     Shard("data/chats")
        ... except UnsupportedVersionError as error:
        ...     print(f"found version {error.found}, supported are {error.supported}")
        found version 2, supported are [1]
    """

    def __init__(self, path: str, found: int, supported: Sequence[int]) -> None:
        self.path, self.found, self.supported = path, found, list(supported)
        super().__init__(path, found, self.supported)

    def __str__(self) -> str:
        versions = ", ".join(map(str, self.supported))
        return (
            f"{self.path}: format version {self.found}, but this package reads {versions} (rule H2); upgrade"
            " megatron-sft-idx, or check that the file is not corrupt"
        )


class CorruptShardError(FormatError):
    """Bytes of a shard break a rule of FORMAT.md.

    Attributes:
        path: the file with the broken bytes.
        offset: byte offset of the broken bytes in that file; None if its checksum does not match.
        rule: the rule's number in FORMAT.md, such as ``"H3"``.
        detail: what was found, what was expected, and what to do.

    Example:
        >>> import os
        >>> from megatron_sft_idx import Shard
        >>> os.truncate("data/chats.bin", 100)  # as if copying it was interrupted
        >>> try:
        ...     Shard("data/chats")
        ... except CorruptShardError as error:
        ...     print(f"{error.path} is broken at byte {error.offset} (rule {error.rule})")
        data/chats.bin is broken at byte 100 (rule F2)
    """

    def __init__(self, path: str, offset: int | None, rule: str, detail: str) -> None:
        self.path, self.offset, self.rule, self.detail = path, offset, rule, detail
        super().__init__(path, offset, rule, detail)

    def __str__(self) -> str:
        where = self.path if self.offset is None else f"{self.path}: byte {self.offset}"
        return f"{where}: {self.detail} (rule {self.rule})"


class SequenceError(SFTIndexError, ValueError):
    """A row, sequence or pack that cannot be used.

    Attributes:
        source: the origin of the row: a file, or the name of an argument.
        position: number of the line, row or pack in the source; None if the error is about the whole source.
        reason: why it cannot be used, and how to fix that.

    Example:
        >>> from megatron_sft_idx import pack_sequences
        >>> lengths = [700, 5000, 600]
        >>> try:
        ...     pack_sequences(lengths, capacity=4096)
        ... except SequenceError as error:
        ...     print(f"sequence {error.position} has {lengths[error.position]} tokens")
        sequence 1 has 5000 tokens
    """

    def __init__(self, source: str, position: int | None, reason: str) -> None:
        self.source, self.position, self.reason = source, position, reason
        super().__init__(source, position, reason)

    def __str__(self) -> str:
        where = self.source if self.position is None else f"{self.source}:{self.position}"
        return f"{where}: {self.reason}"


class StorageError(SFTIndexError):
    """A read from or write to an object store failed. The data themselves may be intact.

    It is not an ``OSError``, because an ``OSError`` comes from the local system, with an error number and a local file.

    Attributes:
        path: the object.
        reason: the answer of the store, how long it was retried, and a remedy.
        missing: whether the object does not exist.

    Example:
        >>> from megatron_sft_idx import Shard
        >>> try:
        ...     Shard("s3://bucket/chats")  # without credentials
        ... except StorageError as error:
        ...     print("no access to", error.path)
        no access to s3://bucket/chats.seq.idx
    """

    def __init__(self, path: str, reason: str, missing: bool = False) -> None:
        self.path, self.reason, self.missing = path, reason, missing
        super().__init__(path, reason, missing)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


# ---- checks of options ----


def check_option(name: str, value: Any, hint: Any, lowest: int = 1, highest: int = 2**31 - 1) -> None:
    """Check an option against its type hint if that is ``bool``, ``int`` or a ``Literal``; accept any other option.

    Raises:
        FormatError: the value is not one of the choices, or not an integer from ``lowest`` to ``highest``.
    """
    if hint is bool and not isinstance(value, bool):
        raise FormatError(f"{name}: {brief(value)}, expected True or False")
    if get_origin(hint) is Literal and not (isinstance(value, str) and value in get_args(hint)):
        raise FormatError(f"{name}: {brief(value)}, choose one of {', '.join(get_args(hint))}")
    is_number = hint is int or (hint == int | None and value is not None)
    if is_number and (not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest):
        raise FormatError(f"{name}: {brief(value)}, expected a whole number from {lowest} to {highest}")


def check_options(options: Any, **ranges: tuple[int, int]) -> None:
    """Call ``check_option`` for every field of an options dataclass; ``ranges`` gives (lowest, highest) by name."""
    kind: type = type(options)
    for name, hint in _hints_of(kind).items():
        check_option(name, getattr(options, name), hint, *ranges.get(name, ()))


@cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def brief(value: Any) -> str:
    """Return a value as one short line for an error message."""
    if value is None or isinstance(value, bool | int | float | str | os.PathLike):
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge number"
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"a {type(value).__name__}"


def nearest_names(name: str, known: Collection[str]) -> list[str]:
    """Return up to three names that begin with ``name``, or else the most similar name, if there is one."""
    from difflib import get_close_matches  # the import takes 2 ms, so only errors pay for it

    begun = sorted(each for each in known if len(name) > 1 and each.startswith(name))
    return begun[:_MAX_OFFERED] or get_close_matches(name, sorted(known), n=1)


def did_you_mean(names: Sequence[str]) -> str:
    """Return the end of an error message that suggests names; "" for none.

    >>> did_you_mean(nearest_names("mesages", ["messages", "prompt"]))
    '; did you mean messages?'
    """
    return f"; did you mean {' or '.join(names)}?" if names else ""
