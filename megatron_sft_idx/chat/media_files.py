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
    size = _image_size(data, file.what, limits) if file.kind == "image" else _audio_size(data, file.what, limits)
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


def _image_size(data: bytes, what: str, limits: MediaLimits) -> tuple[int, int]:
    image_module = _module("PIL.Image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, which are refused below
            image = image_module.open(io.BytesIO(data), formats=_IMAGE_FORMATS)
            if image.width * image.height > limits.max_pixels:
                raise RowError(
                    f"{what}: an image of {image.width} x {image.height} pixels, more than {limits.max_pixels:,}"
                )
            image.load()
    except RowError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise RowError(f"{what}: no image that can be decoded: {brief(str(error))}") from None
    return image.height, image.width


def _audio_size(data: bytes, what: str, limits: MediaLimits) -> tuple[int, int]:
    soundfile = _module("soundfile")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            if sound.frames > limits.max_seconds * sound.samplerate:
                seconds = sound.frames / sound.samplerate
                raise RowError(f"{what}: a recording of {seconds:,.0f} seconds, more than {limits.max_seconds:,}")
            read = sum(len(block) for block in sound.blocks(1 << 16, dtype="float32"))
            if read != sound.frames or not read:
                raise RowError(f"{what}: the recording ends after {read:,} samples of {sound.frames:,}")
            return int(sound.frames), int(sound.samplerate)
    except RowError:
        raise
    except Exception as error:  # the library's errors, and those of its callbacks
        raise RowError(f"{what}: no recording that can be decoded: {brief(str(error))}") from None


def _module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise FormatError(f"images and audio need {name.partition('.')[0]}: {MISSING} ({error})") from None
