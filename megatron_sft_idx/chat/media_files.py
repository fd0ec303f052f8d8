"""Encoded files of images and audio: found, read, and looked at before anything trusts them.

The size of an image, or the length of a recording, is taken from the head of its file, and refused there if it is too
large: nothing is decoded before. Then the whole file is decoded once, so that one that is cut short is a bad row now
and not an error of the training.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from megatron_sft_idx.chat.media_parts import MediaFile
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.media import Kind

# What pillow may decode. Formats that can hold programs, or whose decoders are rarely tried, are left out.
_IMAGE_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_SCHEMES: Final = ("http://", "https://", "s3://", "gs://", "hf://", "ftp://")
MISSING: Final = "pip install 'megatron-sft-idx[media]'"


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What is read of images and audio, and from where.

    Attributes:
        root: folder that relative paths begin at, and that no path leaves.
        max_nbytes: of an encoded file.
        max_pixels: of an image.
        max_seconds: of a recording.
    """

    root: str = "."
    max_nbytes: int = 256 << 20
    max_pixels: int = 1 << 27
    max_seconds: int = 4 * 3600


class LoadedMedia(NamedTuple):
    """An image or a recording that was read and looked at.

    Attributes:
        kind: ``image`` or ``audio``.
        data: the encoded file.
        size: height and width of an image in pixels, as it is stored; of a recording its samples, and their
            rate in hertz.
    """

    kind: Kind
    data: bytes
    size: tuple[int, int]


def load_media(file: MediaFile, limits: MediaLimits) -> LoadedMedia:
    """Read a file and look at it. RowError: it is missing, of an unknown type, damaged or too large."""
    data = _read(file, limits)
    if not data:
        raise RowError(f"{file.what}: the {file.kind} is empty")
    try:
        size = _decoded_size(file.kind, data, limits)
    except RowError as error:
        raise RowError(f"{file.what}: {error}") from None
    return LoadedMedia(file.kind, data, size)


def _read(file: MediaFile, limits: MediaLimits) -> bytes:
    if isinstance(file.given, bytes):
        data = file.given
    elif file.given.startswith("data:"):
        data = _of_uri(file)
    elif file.given.startswith(_SCHEMES):
        raise RowError(f"{file.what} is a URL, {brief(file.given)}; download the files and give their paths")
    else:
        data = _of_path(file, limits)
    if len(data) > limits.max_nbytes:
        raise RowError(f"{file.what}: the {file.kind} has {len(data):,} bytes, more than {limits.max_nbytes:,}")
    return data


def _of_uri(file: MediaFile) -> bytes:
    assert isinstance(file.given, str)
    head, comma, body = file.given.partition(",")
    try:
        if comma and head.endswith(";base64"):
            return base64.b64decode("".join(body.split()), validate=True)
        if comma:
            return unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"{file.what} is no base64: {error}") from None
    raise RowError(f"{file.what} is a data: URI without data")


def _of_path(file: MediaFile, limits: MediaLimits) -> bytes:
    assert isinstance(file.given, str)
    given = file.given.removeprefix("file://")
    root = os.path.realpath(limits.root)
    path = os.path.realpath(os.path.join(root, given))
    if os.path.commonpath([root, path]) != root:
        raise RowError(f"{file.what}: {brief(given)} is not in {limits.root}; --media-root FOLDER says where files are")
    try:
        # O_NONBLOCK: opening a pipe would wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as stream:
            return stream.read(limits.max_nbytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RowError(f"{file.what}: {brief(path)}: {reason}; --media-root FOLDER says where files are") from None


@contextmanager
def open_image(data: bytes | memoryview, limits: MediaLimits) -> Iterator[Any]:
    """An image of pillow of which only the head was read; the body may decode it.

    Raises:
        RowError: it has too many pixels, or it cannot be decoded, here or in the body.
        FormatError: pillow is not installed.
    """
    image_module = _module("PIL.Image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, which are refused below
            with image_module.open(io.BytesIO(data), formats=_IMAGE_FORMATS) as image:
                if image.width * image.height > limits.max_pixels:
                    size = f"{image.width} x {image.height}"
                    raise RowError(f"an image of {size} pixels, more than {limits.max_pixels:,}")
                yield image
    except RowError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise RowError(f"no image that can be decoded: {brief(str(error))}") from None


@contextmanager
def open_recording(data: bytes | memoryview, limits: MediaLimits) -> Iterator[Any]:
    """A recording of soundfile of which only the head was read; the body may decode it.

    Raises:
        RowError: it is too long, or it cannot be decoded, here or in the body.
        FormatError: soundfile is not installed.
    """
    soundfile = _module("soundfile")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            if sound.frames > limits.max_seconds * sound.samplerate:
                seconds = sound.frames / sound.samplerate
                raise RowError(f"a recording of {seconds:,.0f} seconds, more than {limits.max_seconds:,}")
            yield sound
    except RowError:
        raise
    except Exception as error:  # the library's errors, and those of its callbacks
        raise RowError(f"no recording that can be decoded: {brief(str(error))}") from None


def size_of_media(kind: Kind, data: bytes | memoryview, limits: MediaLimits) -> tuple[int, int]:
    """The size of an image or a recording by the head of its file, as ``LoadedMedia`` has it; nothing is decoded.

    Errors as of ``open_image`` and ``open_recording``.
    """
    if kind == "image":
        with open_image(data, limits) as image:
            return image.height, image.width
    with open_recording(data, limits) as sound:
        return int(sound.frames), int(sound.samplerate)


def _decoded_size(kind: Kind, data: bytes, limits: MediaLimits) -> tuple[int, int]:
    """The same, once the whole file was decoded."""
    if kind == "image":
        with open_image(data, limits) as image:
            image.load()
            return image.height, image.width
    with open_recording(data, limits) as sound:
        read = sum(len(block) for block in sound.blocks(1 << 16, dtype="float32"))
        if read != sound.frames or not read:
            raise RowError(f"the recording ends after {read:,} samples of {sound.frames:,}")
        return int(sound.frames), int(sound.samplerate)


def _module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise FormatError(f"images and audio need {name.partition('.')[0]}: {MISSING} ({error})") from None
