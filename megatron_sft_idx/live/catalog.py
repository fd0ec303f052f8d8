"""The folder of a catalog: the names of its shards, its JSON documents, and how to wait for what is still to come.

::

    shard-000000.*        shards, six digits at least, each published atomically
    _producer.json        ProducerState: alive, what is published, limits, how far the input is read
    _END.json             how many shards there are; written once, last
    _acks/NAME/           Ack: how far each rank of consumer NAME has trained, as of its last checkpoint

Documents are replaced as wholes. They may have been written by another version or with bad intentions, so their size,
syntax, version and the type of every field are checked, and anything wrong is a FormatError.

On a network file system a single look may find half a document, an outdated entry or a server error. Everything that
one side reads while the other side writes is read through ``patiently``.

A wait is logged with who waits, for how long and for what, and one that could last for ever ends in an error. Times
are those of a process's own monotonic clock alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import orjson

from megatron_sft_idx.errors import FormatError, SFTIndexError, ShardNotFoundError, UnsupportedVersionError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import listed_columns
from megatron_sft_idx.lines import get_logger
from megatron_sft_idx.shard import read_header
from megatron_sft_idx.storage import read_beginning, require_local
from megatron_sft_idx.storage.publish import Kind, head_of, write_control_file

logger = get_logger("megatron_sft_idx.live")

PRODUCER, END, ACKS = "_producer.json", "_END.json", "_acks"
VERSION = 1
# Far above what is ever written: a leftover of every one of a million shards.
MAX_NBYTES = 64 << 20
_LARGEST = 2**62
_NAME = re.compile(r"shard-([0-9]{6,18})\.")
_REMEDY = (
    "keep it where producer and trainers share a file system; shards that are done may be copied to a bucket"
    " (megatron-sft-idx copy), and trained on from there"
)
# In a record: a whole number from 1 on, where a plain int is one from 0 on.
Positive: TypeAlias = Annotated[int, 1]
State = Literal["running", "waiting for consumers", "waiting for input", "failed", "stopped"]


_R = TypeVar("_R", bound="Record")
_T = TypeVar("_T")

# ---- records ----


class Record:
    """A dataclass that is written as JSON, and checked against its annotations when it is read.

    Fields are whole numbers, texts, true or false, one of some literals, any of these or None, objects as they are
    (``dict[str, Any]``), other records, and tuples of whole numbers or records.
    """

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The record as plain values, which ``parse`` reads."""
        values: dict[str, Any] = orjson.loads(orjson.dumps(self))
        return values

    def contradiction(self) -> tuple[str, Any, str] | None:
        """A field whose value contradicts the others: its name, its value and what is expected; else None."""
        return None

    @classmethod
    def parse(cls: type[_R], path: str, content: Any, where: str = "") -> _R:
        """The record in the plain values ``content``, of the document at ``path`` or of its field ``where``.

        Raises:
            FormatError: a field is missing, of another type, or does not go with the others.
        """
        if not isinstance(content, dict):
            raise _wrong(path, where.rstrip("."), content, "an object")
        record = cls(**{name: _value(hint, path, where + name, content.get(name)) for name, hint in _hints(cls)})  # type: ignore[arg-type]
        if (found := record.contradiction()) is not None:
            raise _wrong(path, where + found[0], *found[1:])
        return record


@cache
def _hints(kind: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(entry.name, hints[entry.name]) for entry in dataclasses.fields(kind)]


def _value(hint: Any, path: str, name: str, value: Any) -> Any:
    """A value of the type that an annotation asks for. FormatError where it is of another one."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else _value(inner[0], path, name, value)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(path, name, value, "a list")
        numbered = ((f"{name}[{i}]" if isinstance(one, dict) else name, one) for i, one in enumerate(value))
        return tuple(_value(inner[0], path, place, one) for place, one in numbered)
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.parse(path, value, f"{name}.")
    if hint is int or origin is Annotated:
        least = inner[1] if inner else 0
        right = type(value) is int and least <= value <= _LARGEST
        expected = f"a whole number from {least} on"
    elif origin is Literal:
        right = value in inner
        expected = (" or " if len(inner) == 2 else " | ").join(inner)
    else:
        right = type(value) is (origin or hint)
        expected = {bool: "true or false", str: "a string", dict: "an object"}[origin or hint]
    if not right:
        raise _wrong(path, name, value, expected)
    return value


def _wrong(path: str, name: str, found: Any, expected: str) -> FormatError:
    return FormatError(
        f"{path}: {name} is {repr(found)[:80]}, expected {expected}; whatever wrote this file is not megatron-sft-idx,"
        " or another version of it"
    )


# ---- documents ----


def require_version(path: str, content: dict[str, Any], version: int = VERSION) -> None:
    """UnsupportedVersionError where a document is of another version; FormatError where it does not say of which."""
    if _value(int, path, "version", content.get("version")) != version:
        raise UnsupportedVersionError(path, content["version"], [version])


# What documents of this package begin with.
_BEGIN = b'{"version":'


def _begins_as_ours(data: bytes) -> bool:
    return bool(data) and (data.startswith(_BEGIN) or _BEGIN.startswith(data))


def read_document(path: str) -> dict[str, Any] | None:
    """The content of the document at ``path``; None where there is none. Looks ``patiently``.

    Raises:
        FormatError: something else is there, or it is too large, torn or of another version.
        SFTIndexError, OSError: it cannot be read.
    """
    try:
        return patiently(path, lambda: look_at_document(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def look_at_document(path: str) -> dict[str, Any]:
    """One look at a document.

    Raises:
        UnsettledError: it is torn, and may be whole at the next look.
        FormatError, OSError: as of ``read_document``; FileNotFoundError or NotADirectoryError where there is none.
    """
    try:
        data = read_beginning(path, MAX_NBYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.islink(path):
            raise
        raise FormatError(
            f"{path}: a symbolic link to nothing is here, expected a file or nothing; remove it"
        ) from None
    except IsADirectoryError:
        raise FormatError(f"{path}: a folder is here, expected a file; remove it") from None
    if len(data) > MAX_NBYTES:
        raise FormatError(f"{path}: more than {MAX_NBYTES} bytes, which no such file ever has; remove it")
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        # A document that is torn is empty, begins as all do, or has zeros where nothing was written yet.
        is_torn = data[:1] in (b"", b"\0") or _begins_as_ours(data)
        raise (UnsettledError if is_torn else FormatError)(
            f"{path}: not a JSON document ({error.msg} at character {error.pos + 1}): damaged, or not written by"
            " megatron-sft-idx, which replaces it as a whole; restore it from a copy, or make its folder anew"
        ) from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: found a JSON {type(content).__name__}, expected an object")
    require_version(path, content)
    return content


def write_document(path: str, record: Record, what: str) -> None:
    """Replace the document at ``path`` durably and as a whole; of several writers the last one wins.

    A document of this package that is torn is replaced too.

    Raises:
        FormatError: something is there that cannot be read as a document of this kind, which sentences call ``what``.
        SFTIndexError, OSError: the disk says no.
    """

    def recognize(found: str) -> bool:
        try:
            return record.parse(found, look_at_document(found)) is not None
        except UnsettledError:
            with contextlib.suppress(OSError):
                return _begins_as_ours(head_of(found, len(_BEGIN)))
        except (SFTIndexError, OSError):
            pass
        return False

    data = _BEGIN + orjson.dumps(VERSION) + b"," + orjson.dumps(record.to_json())[1:]

    def write() -> None:
        try:
            write_control_file(path, data, Kind(what, recognize), overwrite=True)
        except FormatError:  # another writer may have replaced it in between, or it could not be read just then
            write_control_file(path, data, Kind(what, recognize), overwrite=True)

    patiently(path, write)


# ---- what a producer says ----


def default_max_sequences(capacity: int) -> int:
    """The most sequences in a pack where no limit is given; batches are shaped by it before any shard is there."""
    return max(64, capacity // 32)


@dataclass(frozen=True, slots=True)
class Limits(Record):
    """What all shards of a catalog keep to, also those still to come, and how far the producer may run ahead.

    Attributes:
        capacity: most token positions of a pack.
        max_sequences_per_pack: most sequences of a pack; ``cu_seqlens`` is made that wide.
        sequence_multiple: each sequence counts as its length rounded up to this.
        token_dtype: ``uint16`` or ``int32``.
        consumers: training runs that read the catalog.
        max_ahead_shards: most published shards that a consumer has not completed; None for no limit.
        max_ahead_nbytes: most bytes of these; None for no limit.
        keep_recent: completed shards that are kept, the newest; older ones are removed. None removes nothing.
    """

    capacity: Positive
    max_sequences_per_pack: Positive
    sequence_multiple: Positive = 1
    token_dtype: Literal["uint16", "int32"] = "int32"
    consumers: Positive = 1
    max_ahead_shards: Positive | None = None
    max_ahead_nbytes: Positive | None = None
    keep_recent: int | None = None

    @property
    def needs_acks(self) -> bool:
        """Whether the producer waits for consumers, or removes what they have completed."""
        return (self.max_ahead_shards, self.max_ahead_nbytes, self.keep_recent) != (None, None, None)


@dataclass(frozen=True, slots=True)
class ProducerState(Record):
    """The content of ``_producer.json``: whether the producer is alive, what it promises, and how far it is.

    Attributes:
        limits: what consumers may rely on.
        beat: grows with every rewrite, which a living producer does about every two seconds. No clock is in here: a
            watcher notes, on its own, when it last saw this change.
        state: what the producer is doing.
        reason: why it failed or stopped.
        published: shards below this number have been published.
        freed: shards below this number have been removed.
        options: what decides over the bytes of the shards, as the producer compares it when it is started again.
        input: how far the input is read, as of the last published shard.
    """

    limits: Limits
    beat: int = 0
    state: State = "running"
    reason: str | None = None
    published: int = 0
    freed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    input: dict[str, Any] = field(default_factory=dict)

    def contradiction(self) -> tuple[str, Any, str] | None:
        """More shards were removed than published."""
        if self.freed <= self.published:
            return None
        return "freed", self.freed, f"no more than the {self.published} published"


@dataclass(frozen=True, slots=True)
class _End(Record):
    shards: int


# ---- the folder ----


def shard_name(number: int) -> str:
    """``shard-000011``; names of a million shards and more have more digits, and do not sort as their numbers do."""
    return f"shard-{number:06d}"


class Catalog:
    """A catalog's folder; every call looks at the disk anew.

    Args:
        folder: its path. It need not exist yet. FormatError where it is in an object store.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require_local(folder, "a live catalog", _REMEDY)
        self.folder = os.fspath(folder)

    def shard_prefix(self, number: int) -> str:
        """The path that the five files of a shard share."""
        return os.path.join(self.folder, shard_name(number))

    def is_published(self, number: int) -> bool:
        """Whether a shard is there, by one of its files."""
        return status_of(ShardPaths.of(self.shard_prefix(number)).seq_idx) is not None

    def numbers(self) -> list[int]:
        """The shards that are there, in order."""
        return [number for number, suffixes in self._found().items() if "seq.idx" in suffixes]

    def present(self) -> list[int]:
        """The shards of which anything is there, also what is being written or was not wholly removed; in order."""
        return list(self._found())

    def shard_nbytes(self, number: int) -> int:
        """How many bytes a shard takes on disk; 0 where it is gone."""
        total, paths = 0, ShardPaths.of(self.shard_prefix(number))
        with contextlib.suppress(FormatError, ShardNotFoundError):
            header = patiently(paths.seq_idx, lambda: read_header(paths))
            paths = paths.with_columns(listed_columns(header.metadata))
        for path in paths.all:
            if (status := status_of(path)) is not None:
                total += status.st_size
        return total

    def producer(self) -> ProducerState | None:
        """What the producer wrote last; None where no producer was ever here. FormatError: the file is damaged."""
        content = read_document(path := os.path.join(self.folder, PRODUCER))
        return None if content is None else ProducerState.parse(path, content)

    def end(self) -> int | None:
        """How many shards there are in all, removed ones included; None where more may come."""
        content = read_document(path := os.path.join(self.folder, END))
        return None if content is None else _End.parse(path, content).shards

    def write_producer(self, state: ProducerState) -> None:
        """Replace ``_producer.json``. The caller must be the producer that holds the catalog."""
        write_document(os.path.join(self.folder, PRODUCER), state, "the state of a producer")

    def write_end(self, shards: int) -> None:
        """Write down that there are so many shards and no more will come. The caller must have published all."""
        write_document(os.path.join(self.folder, END), _End(shards), "the end of a catalog")

    def _found(self) -> dict[int, set[str]]:
        """By the number of each shard of which any file is there, in order: what follows its name in those files."""
        found: dict[int, set[str]] = {}
        for name in listed(self.folder):
            if (match := _NAME.match(name)) and name.startswith(shard_name(number := int(match[1])) + "."):
                found.setdefault(number, set()).add(name[match.end() :])
        return dict(sorted(found.items()))


# ---- waiting ----


class Stopped(Exception):  # noqa: N818
    """A wait was given up because the consumer closes; nobody but the consumer's own thread sees it."""


def looks(
    say: Callable[[float], object],
    *,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    quiet: float = 0.0,
    longest: float = 1.0,
) -> Iterator[float]:
    """A wait: yields whenever it is time to look again, each time the seconds waited so far.

    Args:
        say: called with the seconds waited, once they are ``quiet`` and then once a minute.
        pause: sleeps so many seconds. Once it returns something true, ``Stopped`` is raised.
        clock: seconds since some moment.
        quiet: how long a wait may last before it is worth a line in the log.
        longest: the longest pause, in seconds; pauses grow up to it.
    """
    begin, seconds, next_line = clock(), 0.05, quiet
    while True:
        waited = clock() - begin
        yield waited
        if waited >= next_line:
            say(waited)
            next_line = waited + 60.0
        if pause(seconds):
            raise Stopped
        seconds = min(2 * seconds, longest)


@dataclass(frozen=True)
class Waiter:
    """Somebody who waits, and how.

    Attributes:
        who: the name in log messages, such as ``rank 3``.
        pause: sleeps so many seconds; it returns something true once the waiter is to stop, as ``Event.wait`` does.
        say: takes log messages; of the workers of one rank, only one logs them.
        clock: seconds since some moment.
    """

    who: str
    pause: Callable[[float], object] = time.sleep
    say: Callable[[str], object] = logger.info
    clock: Callable[[], float] = time.monotonic

    def looks(self, why: Callable[[], str]) -> Iterator[float]:
        """As the function ``looks``; the log says at once, and then once a minute, what is waited for: ``why()``."""
        return looks(
            lambda waited: self.say(f"{self.who} waits {waited:.0f} s for {why()}"), pause=self.pause, clock=self.clock
        )


class Unchanged:
    """How long something has been the same; ``sight`` is what it was at the last look, None before the first one.

    Args:
        clock: seconds since some moment.
        longest_gap: the time between two looks that are further apart is not counted, because nobody looked.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, longest_gap: float = math.inf) -> None:
        self._clock, self._longest_gap = clock, longest_gap
        self._since = self._looked = clock()
        self.sight: Any = None

    def seconds(self, sight: Any) -> float:
        """For how long it has been ``sight``, in seconds: 0 where it was something else at the last look."""
        now = self._clock()
        if now - self._looked > self._longest_gap:
            self._since += now - self._looked
        self._looked = now
        if sight != self.sight:
            self.sight, self._since = sight, now
        return now - self._since


# ---- looking at what others write ----

# Errors that a network file system may return for a while, for example while its server is replaced.
PASSING_ERRORS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO, errno.EAGAIN, errno.EBUSY}
)
# A failure that lasts for so long, and for so many looks, is an error.
_PATIENCE_SECONDS, _LEAST_LOOKS = 30.0, 3


class UnsettledError(FormatError):
    """What was found may be half written. The next look may find it whole."""


def patiently(path: str, look: Callable[[], _T]) -> _T:
    """Return ``look()``, and call it again where it fails in a way that may pass.

    A file counts as missing only if a second look confirms it. ``UnsettledError`` and ``PASSING_ERRORS`` are errors
    only after 30 seconds and at least three looks.

    Args:
        path: what is looked at, for messages.
        look: called once or more.

    Raises:
        SFTIndexError: one of ``PASSING_ERRORS`` lasted; the message has the path and the errno.
        UnsettledError: it lasted.
        OSError: any other error, such as FileNotFoundError.
    """
    last: UnsettledError | OSError | None = None

    def warn(waited: float) -> None:
        logger.warning("%s: failing for %.0f s, trying again: %s", path, waited, last)

    waits = looks(warn, pause=time.sleep, clock=time.monotonic, quiet=1.0)
    for failures, waited in enumerate(waits):
        if last is not None and failures >= _LEAST_LOOKS and waited >= _PATIENCE_SECONDS:
            break
        try:
            try:
                return look()
            except (FileNotFoundError, NotADirectoryError):
                return look()
        except UnsettledError as error:
            last = error
        except OSError as error:
            if error.errno not in PASSING_ERRORS:
                raise
            last = error
    if isinstance(last, UnsettledError):
        raise last
    assert isinstance(last, OSError)
    name = errno.errorcode.get(last.errno or 0, "unknown error")
    raise SFTIndexError(
        f"{last.filename or path}: {last.strerror} ({name}, errno {last.errno}), {failures} times in"
        f" {waited:.0f} s; check the file system, then run the same command again"
    ) from last


def status_of(path: str) -> os.stat_result | None:
    """The status of a file, which is looked at ``patiently``; None where it is not there."""
    try:
        return patiently(path, lambda: os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def listed(folder: str) -> list[str]:
    """The names in a folder, sorted; none where there is no such folder. Looks ``patiently``."""
    try:
        return sorted(patiently(folder, lambda: os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return []
