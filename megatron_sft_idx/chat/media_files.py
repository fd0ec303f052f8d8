"""Encoded image and audio files: find, read and check them before anything relies on them.

The size of an image, or the length of a recording, is read from the head of its file, and a file that is too large is
rejected before any decoding. Then the whole file is decoded once, so that a truncated file is a bad row now and not an
error during training.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.media_parts import MediaFile
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.media_layout import Kind

# Formats that pillow may decode. Formats that can contain programs, or with rarely tested decoders, are excluded.
_IMAGE_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_SCHEMES: Final = ("http://", "https://", "s3://", "gs://", "hf://", "ftp://")
# The EXIF tag for the orientation of an image, and its values for a quarter turn.
_ORIENTATION: Final = 0x0112
_LYING: Final = (5, 6, 7, 8)
_TIFF_WIDTH, _TIFF_HEIGHT = 0x0100, 0x0101
# libsndfile's note about uncompressed samples that end before the length in the file's head: WAV, AIFF, AU, W64, RF64.
_SHORTER: Final = re.compile(r"^ *(?:data|SSND|Data Size|riff|Riff size) *: (\d+) \(should be (\d+)\)", re.M)
# Programs that write into a pipe do not know the length, and write the largest value, or nearly.
_UNKNOWN_LENGTH: Final = (1 << 31) - (1 << 16)
_DOWNLOADED: Final = ("http://", "https://")
_TIMEOUT_SECONDS: Final = 60
_OBJECT: Final = re.compile(r" ?<[\w.]+ object at 0x[0-9a-f]+>")
MISSING: Final = "pip install 'megatron-sft-idx[media]'"


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits and sources for reading images and audio.

    Attributes:
        root: folder for relative paths, which no path may leave; None for the folder of the input file.
        download: whether to download files given as URLs.
        max_nbytes: maximum size of an encoded file.
        max_pixels: maximum number of pixels of an image.
        max_seconds: maximum length of a recording.
    """

    root: str | None = None
    download: bool = False
    max_nbytes: int = 256 << 20
    max_pixels: int = 1 << 27
    max_seconds: int = 4 * 3600


class LoadedMedia(NamedTuple):
    """An image or recording that was read and checked.

    Attributes:
        kind: ``image`` or ``audio``.
        size: for an image, height and width in pixels after rotation to upright, as transformers and datasets load it;
            for a recording, the number of samples and their rate in hertz.
        blob: number of the encoded file among the collected files.
    """

    kind: Kind
    size: tuple[int, int]
    blob: int


def read_media(file: MediaFile, limits: MediaLimits, folder: str | None) -> bytes:
    """Read an encoded file.

    Args:
        file: the file.
        limits: limits and sources.
        folder: folder for relative paths if ``limits.root`` is None; None for no folder.

    Raises:
        RowError: the file is missing, empty, too large or outside the root, or is invalid base64.
    """
    if isinstance(file.given, bytes):
        data = file.given
    elif file.given.startswith("data:"):
        data = _of_uri(file)
    elif is_url(file.given):
        data = _of_url(file, limits)
    else:
        data = _of_path(file, limits, folder if limits.root is None else limits.root)
    if len(data) > limits.max_nbytes:
        raise RowError(f"{file.what}: the {file.kind} has more than {limits.max_nbytes:,} bytes")
    if not data:
        raise RowError(f"{file.what}: the {file.kind} is empty")
    return data


def size_of_media(kind: Kind, data: bytes, what: str, limits: MediaLimits) -> tuple[int, int]:
    """Return the size of a file in the form of ``LoadedMedia``. Decodes the whole file.

    RowError: the type is unknown, or the file is damaged or too large.
    """
    try:
        return _decoded_size(kind, data, limits)
    except RowError as error:
        raise RowError(f"{what}: {error}") from None


def is_url(given: str) -> bool:
    """Return whether a text refers to a file on another machine."""
    return given.lower().startswith(_SCHEMES)


def _of_url(file: MediaFile, limits: MediaLimits) -> bytes:
    assert isinstance(file.given, str)
    url = file.given
    if not url.lower().startswith(_DOWNLOADED):
        raise RowError(f"{file.what} is in object storage, {brief(url)}; copy the files to a disk and use their paths")
    if not limits.download:
        raise RowError(
            f"{file.what} is a URL, {brief(url)}; pass --download to fetch it, or use paths of downloaded files"
        )
    request = Request(url, headers={"User-Agent": "megatron-sft-idx"})
    try:
        with urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            data = response.read(limits.max_nbytes + 1)
            expected = response.headers.get("Content-Length")
    except (OSError, ValueError, HTTPException) as error:
        raise RowError(f"{file.what}: {brief(url)} cannot be downloaded: {error}") from None
    if expected is not None and expected.isdecimal() and len(data) < min(int(expected), limits.max_nbytes):
        raise RowError(
            f"{file.what}: the download of {brief(url)} ended after {len(data):,} of {int(expected):,} bytes"
        )
    return bytes(data)


def _of_uri(file: MediaFile) -> bytes:
    assert isinstance(file.given, str)
    head, comma, body = file.given.partition(",")
    try:
        if comma and head.endswith(";base64"):
            return base64.b64decode("".join(body.split()), validate=True)
        if comma:
            return unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"{file.what} is not valid base64: {error}") from None
    raise RowError(f"{file.what} is a data: URI without data")


def _of_path(file: MediaFile, limits: MediaLimits, folder: str | None) -> bytes:
    assert isinstance(file.given, str)
    given = file.given.removeprefix("file://")
    if folder is None:
        raise RowError(f"{file.what} is a path, {brief(given)}; pass --media-root FOLDER, the folder of the files")
    path = given
    try:
        root = os.path.realpath(folder)
        path = os.path.realpath(os.path.join(root, given))
        if os.path.commonpath([root, path]) != root:
            raise RowError(
                f"{file.what}: {brief(given)} is outside {folder}; pass --media-root FOLDER, a folder that contains"
                " the files"
            )
        # O_NONBLOCK: opening a pipe would wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as stream:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise RowError(f"{file.what}: {brief(path)} is not a regular file")
            return stream.read(limits.max_nbytes + 1)
    except RowError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a text that cannot be a path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RowError(
            f"{file.what}: {brief(path)}: {reason}; check the path, or pass --media-root FOLDER, the folder of the"
            " files"
        ) from None


@contextmanager
def open_image(data: bytes | memoryview, limits: MediaLimits) -> Iterator[Any]:
    """Provide a pillow image after reading only its header. The body of the ``with`` block may decode it.

    Raises:
        RowError: it has too many pixels, or cannot be decoded, here or in the body.
        FormatError: pillow is not installed.
    """
    image_module = _module("PIL.Image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images, which are rejected below
            with image_module.open(io.BytesIO(data), formats=_IMAGE_FORMATS) as image:
                if image.width * image.height > limits.max_pixels:
                    size = f"{image.width} x {image.height}"
                    raise RowError(f"an image of {size} pixels, more than {limits.max_pixels:,}")
                yield image
    except RowError:
        raise
    except Exception as error:  # decoders raise nearly anything for damaged files
        raise RowError(f"the image cannot be decoded: {_reason(error)}") from None


@contextmanager
def open_recording(data: bytes | memoryview, limits: MediaLimits) -> Iterator[Any]:
    """Provide a soundfile recording after reading only its header. The body of the ``with`` block may decode it.

    Raises:
        RowError: it is too long, or cannot be decoded, here or in the body.
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
    except Exception as error:  # errors of the library and of its callbacks
        raise RowError(f"the recording cannot be decoded: {_reason(error)}") from None


def samples_at(size: tuple[int, int], rate: int) -> int:
    """Return the number of samples of a recording (samples, rate) at another rate."""
    samples, given = size
    return samples if given == rate else -(-samples * rate // given)


def decoded_image(data: bytes | memoryview, limits: MediaLimits | None = None) -> Any:
    """Return a pillow image in RGB, rotated to upright according to its EXIF data, like transformers.

    See ``open_image`` for errors.
    """
    with open_image(data, limits or MediaLimits()) as image:
        return _module("PIL.ImageOps").exif_transpose(image).convert("RGB")


def decoded_recording(data: bytes | memoryview, rate: int, limits: MediaLimits | None = None) -> NDArray[np.float32]:
    """Return the mono samples of a recording at another rate, float32 [samples], like transformers.

    Channels are averaged. The length is the old one times the ratio of the rates, rounded up.

    Raises:
        RowError: see ``open_recording``.
        FormatError: soundfile, or soxr if the rate differs, is not installed.
    """
    with open_recording(data, limits or MediaLimits()) as sound:
        given = int(sound.samplerate)
        channels = sound.read(dtype="float32", always_2d=True).T
    samples = channels.mean(axis=0) if len(channels) > 1 else channels[0]
    if given != rate:
        wanted = samples_at((len(samples), given), rate)
        samples = _module("soxr").resample(samples, given, rate, quality="soxr_hq")
        samples = np.pad(samples, (0, max(0, wanted - len(samples))))[:wanted]
    return np.ascontiguousarray(samples, np.float32)


def _reason(error: Exception) -> str:
    """Return a decoder's error text without object addresses, which differ each time."""
    return brief(_OBJECT.sub("", str(error)) or type(error).__name__)


def stored_size(kind: Kind, data: bytes | memoryview, limits: MediaLimits) -> tuple[int, int]:
    """Return the size of a file in the form of ``LoadedMedia``, from its head only, without decoding.

    See ``open_image`` and ``open_recording`` for errors.
    """
    if kind == "image":
        with open_image(data, limits) as image:
            return _upright_size(image)
    with open_recording(data, limits) as sound:
        return int(sound.frames), int(sound.samplerate)


def _decoded_size(kind: Kind, data: bytes, limits: MediaLimits) -> tuple[int, int]:
    """Return the same size after decoding the whole file."""
    if kind == "image":
        with open_image(data, limits) as image:
            size = _upright_size(image)  # as from the head; some images are rotated on load
            image.load()
            return size
    with open_recording(data, limits) as sound:
        for said, found in map(_bytes_of, _SHORTER.findall(sound.extra_info)):
            if found < said < _UNKNOWN_LENGTH:
                raise RowError(f"the recording is truncated: its header states {said:,} bytes, the file has {found:,}")
        read = sum(len(block) for block in sound.blocks(1 << 16, dtype="float32"))
        if read != sound.frames or not read:
            raise RowError(f"the recording ends after {read:,} of {sound.frames:,} samples")
        return int(sound.frames), int(sound.samplerate)


def _bytes_of(numbers: tuple[str, str]) -> tuple[int, int]:
    return int(numbers[0]), int(numbers[1])


def _upright_size(image: Any) -> tuple[int, int]:
    """Return height and width of a pillow image after rotation to upright. Needs only the image's header."""
    if image.format == "TIFF":
        # Versions of pillow differ in when they rotate these. The tags have the stored size.
        width, height = int(image.tag_v2[_TIFF_WIDTH]), int(image.tag_v2[_TIFF_HEIGHT])
        return (width, height) if image.tag_v2.get(_ORIENTATION) in _LYING else (height, width)
    lies = image.getexif().get(_ORIENTATION) in _LYING
    return (image.width, image.height) if lies else (image.height, image.width)


def _module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise FormatError(f"images and audio need {name.partition('.')[0]}: {MISSING} ({error})") from None
