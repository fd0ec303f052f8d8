"""Images and audio in rows: ids equal the processor's, masks equal the masks without them, and errors."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from media_processors import LLAVA, PROCESSORS, audio_flamingo, conversation, kind_of, paligemma, png, wav
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoProcessor, LlavaProcessor, PreTrainedConfig
from transformers.audio_utils import load_audio
from transformers.image_utils import load_image

from megatron_sft_idx.chat.inputs import JsonPiece
from megatron_sft_idx.chat.media_files import MediaLimits, size_of_media, stored_size
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.template import MaskOptions
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.packs.run_media import SpilledBlobs
from megatron_sft_idx.tokenize.encoding import EncodedPiece, EncodingOptions, RowEncoder


class Made(NamedTuple):
    """A processor of transformers, and an encoder that uses it."""

    kind: str
    folder: Path
    processor: Any
    encoder: RowEncoder


@pytest.fixture(scope="module", params=list(PROCESSORS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("processor")
    processor = PROCESSORS[request.param](folder)
    return Made(kind_of(request.param), folder, processor, encoder_of(folder))


def encoder_of(folder: Path, **options: Any) -> RowEncoder:
    rows = RowOptions(media=True)
    return RowEncoder(EncodingOptions(str(folder), processor=str(folder), rows=rows, **options))


def shown_in(messages: list[dict[str, Any]], kind: str) -> list[bytes]:
    parts = [part for message in messages for part in message["content"] if part["type"] == kind]
    return [part[kind]["bytes"] for part in parts]


def in_base64(data: bytes) -> str:
    """Return the file in base64, for JSON."""
    return "data:;base64," + base64.b64encode(data).decode()


def encoded(encoder: RowEncoder, rows: list[Any], path: str = "rows.jsonl") -> tuple[EncodedPiece, SpilledBlobs]:
    lines = [json.dumps({"messages": row}, default=in_base64).encode() + b"\n" for row in rows]
    ends = np.cumsum([len(line) for line in lines]) - 1
    piece, blobs = JsonPiece(path, 1, int(ends[-1]), b"".join(lines), ends, False), SpilledBlobs()
    return encoder.encode(piece, media=encoder.media_of(path, blobs)), blobs


def sequences_of(piece: EncodedPiece) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return ids and mask of each sequence."""
    ends = np.cumsum(piece.lengths)[:-1]
    return [*zip(np.split(piece.input_ids, ends), np.split(piece.loss_mask, ends), strict=True)]


def ids_of_processor(made: Made, text: str, shown: list[bytes]) -> list[int]:
    given: dict[str, Any] = {}
    if shown and made.kind == "image":
        given["images"] = [Image.open(io.BytesIO(data)) for data in shown]
    elif shown:
        rate = made.processor.feature_extractor.sampling_rate
        given = {"audio": [load_audio(in_base64(data), rate) for data in shown], "sampling_rate": rate}
    return [*made.processor(text=[text], add_special_tokens=False, **given)["input_ids"][0]]


def without_placeholders(row: list[dict[str, Any]], token: str) -> list[dict[str, Any]]:
    """Return the row without the placeholder's text in its words, which the processor would replace."""
    text = json.dumps(row, default=in_base64).replace(token, token[1:-1])
    return json.loads(text)


def token_of(made: Made) -> str:
    return made.encoder.processor.tokens[made.kind]  # type: ignore[union-attr, index]


def files_for(kind: str) -> list[bytes]:
    if kind == "audio":
        lengths = [(999, 16_000), (4_000, 16_000), (44_101, 44_100), (8_000, 8_000), (70_000, 16_000), (3_001, 48_000)]
        return [wav(*each, seed, channels=1 + seed % 2) for seed, each in enumerate(lengths)]
    sizes = [(28, 42), (64, 64), (100, 30), (17, 90), (200, 150), (14, 14)]
    return [png(*size, seed) for seed, size in enumerate(sizes)]


@pytest.mark.sample(2)
def test_ids_are_those_of_the_processor(made: Made) -> None:
    rng, files, token = random.Random(3), files_for(made.kind), token_of(made)
    drawn = [conversation(rng, made.kind, files) for _ in range(200)]
    rows = [without_placeholders(row, token) for row in drawn]
    piece, blobs = encoded(made.encoder, rows)
    assert not piece.bad_rows, piece.bad_rows[0]
    for row, (ids, mask), media in zip(drawn, sequences_of(piece), piece.media, strict=True):
        plain = without_placeholders(row, token)
        shown = shown_in(row, made.kind)
        text = made.processor.apply_chat_template(
            [{**each, "content": [{**part, made.kind: None} for part in each["content"]]} for each in plain],
            tokenize=False,
        )
        assert ids.tolist() == ids_of_processor(made, text, shown)
        assert [blobs.data(item.blob) for item in media] == shown
        inside = np.zeros(len(ids), bool)
        for item in media:
            assert not inside[item.start : item.start + item.length].any()
            inside[item.start : item.start + item.length] = True
        assert inside[ids == made.processor.tokenizer.convert_tokens_to_ids(token)].all()
        assert not mask[inside].any()
        assert mask.any()


@pytest.mark.sample(2)
def test_every_size_takes_as_many_positions_as_the_processor_says(made: Made) -> None:
    rng = random.Random(5)
    if made.kind == "image":
        files = [png(rng.randint(14, 400), rng.randint(14, 400), seed) for seed in range(50)]
    else:
        rates = (8_000, 11_025, 16_000, 22_050, 44_100, 48_000)
        files = [
            wav(rng.randint(rate // 20, 5 * rate), rate, seed, rng.choice(["WAV", "FLAC", "OGG"]))
            for seed, rate in enumerate(rng.choices(rates, k=50))
        ]
    rows = [
        [
            {
                "role": "user",
                "content": [{"type": made.kind, made.kind: in_base64(data)}, {"type": "text", "text": "?"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
        ]
        for data in files
    ]
    piece, _ = encoded(made.encoder, rows)
    assert not piece.bad_rows, piece.bad_rows[0]
    for row, data, (ids, _) in zip(rows, files, sequences_of(piece), strict=True):
        text = made.processor.apply_chat_template(row, tokenize=False)
        assert ids.tolist() == ids_of_processor(made, text, [data])


@pytest.mark.sample(1)
def test_masks_of_all_else_are_those_of_the_rows_without_images_and_audio(made: Made) -> None:
    """The trained text and its weights are the same, in the same order."""
    rng, files = random.Random(7), files_for(made.kind)
    rows = [conversation(rng, made.kind, files) for _ in range(100)]
    for row in rows:
        for message in row:
            if message["role"] == "assistant" and rng.random() < 0.3:
                message["weight"] = rng.choice([0, 0.5])
    bare = [
        [{**each, "content": [part for part in each["content"] if part["type"] == "text"]} for each in row]
        for row in rows
    ]
    for options in ({}, {"append_eod": True}, {"span_by_span": True}, {"straddling": "exclude"}):
        encoder = encoder_of(made.folder, **options)
        with_media, without = encoded(encoder, rows)[0], encoded(encoder, bare)[0]
        assert not with_media.bad_rows + without.bad_rows
        assert any(map(len, with_media.media))
        assert not any(map(len, without.media))
        for (ids, mask), (bare_ids, bare_mask) in zip(sequences_of(with_media), sequences_of(without), strict=True):
            assert ids[mask != 0].tolist() == bare_ids[bare_mask != 0].tolist()
            assert mask[mask != 0].tolist() == bare_mask[bare_mask != 0].tolist()


def test_placeholders_in_the_words_of_a_row_stay_text(made: Made) -> None:
    """Only text that the template writes for a part is a placeholder.

    Words become plain tokens, like other control tokens.
    """
    token = token_of(made)
    row = [
        {"role": "user", "content": [{"type": "text", "text": f"what is {token}"}]},
        {"role": "assistant", "content": [{"type": "text", "text": f"{token} is a word"}]},
    ]
    piece, _ = encoded(made.encoder, [row])
    assert not piece.bad_rows
    (ids, _), (media,) = sequences_of(piece)[0], piece.media
    assert len(media) == 0
    assert made.processor.tokenizer.convert_tokens_to_ids(token) not in ids.tolist()
    assert made.processor.tokenizer.decode(ids).count(token) == 2


BAD = {
    "no file of this name": ("missing.png", "No such file"),
    "a file outside of the root": ("../outside.png", "is outside"),
    "a text that no path can be": ("a\0.png", "null byte; check the path, or pass --media-root FOLDER"),
    "a URL": ("https://127.0.0.1:1/a.png", "--download"),
    "a store": ("s3://bucket/a.png", "copy the files"),
    "no image at all": (in_base64(b"no image, no audio"), "cannot be decoded"),
    "an empty file": (in_base64(b""), "is empty"),
    "no base64": ("data:;base64,%%%", "base64"),
    "a folder": (".", "directory"),
    "a pipe": ("pipe", "regular file"),
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_a_bad_row(made: Made, tmp_path: Path, case: str) -> None:
    given, expected = BAD[case]
    root = tmp_path / "root"
    root.mkdir()
    os.mkfifo(root / "pipe")
    (tmp_path / "outside.png").write_bytes(files_for(made.kind)[1])
    encoder = encoder_of(made.folder, on_bad_row="skip", media=MediaLimits(str(root)))
    good = [
        {"role": "user", "content": [{"type": made.kind, made.kind: in_base64(files_for(made.kind)[1])}]},
        {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
    ]
    bad = [{"role": "user", "content": [{"type": made.kind, made.kind: given}]}, good[1]]
    piece, _ = encoded(encoder, [good, bad, good])
    assert [error.position for error in piece.bad_rows] == [2]
    assert expected in str(piece.bad_rows[0]), piece.bad_rows[0]
    assert len(piece.lengths) == 2


@pytest.mark.parametrize("limits", [{"max_nbytes": 10}, {"max_pixels": 100, "max_seconds": 0}])
def test_what_is_too_large_is_a_bad_row(made: Made, limits: dict[str, int]) -> None:
    encoder = encoder_of(made.folder, on_bad_row="skip", media=MediaLimits(**limits))
    row = [
        {"role": "user", "content": [{"type": made.kind, made.kind: in_base64(files_for(made.kind)[1])}]},
        {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
    ]
    piece, _ = encoded(encoder, [row])
    assert "more than" in str(piece.bad_rows[0])


def test_a_recording_of_which_the_model_would_hear_nothing_is_a_bad_row(tmp_path: Path) -> None:
    PROCESSORS["qwen2-audio"](tmp_path)
    row = [
        {"role": "user", "content": [{"type": "audio", "audio": in_base64(wav(1))}]},
        {"role": "assistant", "content": "hi"},
    ]
    piece, _ = encoded(encoder_of(tmp_path, on_bad_row="skip"), [row])
    assert "makes no tokens from a recording of 1 samples at 16000 Hz" in str(piece.bad_rows[0])


def test_a_recording_whose_end_the_processor_leaves_out_is_counted(tmp_path: Path) -> None:
    PROCESSORS["qwen2-audio"](tmp_path)
    rows = [
        [
            {"role": "user", "content": [{"type": "audio", "audio": in_base64(wav(samples))}]},
            {"role": "assistant", "content": "hi"},
        ]
        for samples in (64_000, 64_001)
    ]
    piece, _ = encoded(encoder_of(tmp_path), rows)
    assert piece.notes["recordings_cut"] == 1


def test_a_bomb_is_refused_from_its_head(tmp_path: Path) -> None:
    """A PNG with 4 gigapixels in its header and without pixels. The missing pixels would be an error only later."""
    PROCESSORS["llava"](tmp_path)
    head = struct.pack(">IIBBBBB", 65_000, 65_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    chunk += struct.pack(">I", 100) + b"IDAT"
    row = [
        {"role": "user", "content": [{"type": "image", "image": in_base64(b"\x89PNG\r\n\x1a\n" + chunk)}]},
        {"role": "assistant", "content": "hi"},
    ]
    piece, _ = encoded(encoder_of(tmp_path, on_bad_row="skip"), [row])
    assert "4225000000 pixels" in str(piece.bad_rows[0])


def test_an_image_that_lies_on_its_side_has_the_size_of_the_upright_one(tmp_path: Path) -> None:
    processor = PROCESSORS["llava of any size"](tmp_path)
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (140, 28)).save(stream, "JPEG", exif=exif)
    row = [
        {"role": "user", "content": [{"type": "image", "image": in_base64(stream.getvalue())}]},
        {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
    ]
    piece, _ = encoded(encoder_of(tmp_path), [row])
    text = processor.apply_chat_template(row, tokenize=False)
    path = tmp_path / "lying.jpg"
    path.write_bytes(stream.getvalue())
    expected = processor(text=[text], images=[str(path)], add_special_tokens=False)["input_ids"][0]
    assert piece.input_ids.tolist() == list(expected)


# ---- processors that do more than replace placeholders ----


def asking(kind: str, *files: bytes) -> list[dict[str, Any]]:
    """Return a row with these files."""
    parts = [{"type": kind, kind: in_base64(data)} for data in files]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": "say"}]},
        {"role": "assistant", "content": "hi"},
    ]


def test_a_processor_that_writes_into_the_text_is_refused_at_the_start(tmp_path: Path) -> None:
    paligemma(tmp_path)
    with pytest.raises(FormatError, match="PaliGemmaProcessor returns other ids than"):
        encoder_of(tmp_path)


def test_a_processor_of_another_tokenizer_is_refused_at_the_start(tmp_path: Path) -> None:
    made = {name: PROCESSORS[name](tmp_path / name) for name in ("llava", "gemma3")}
    mixed = EncodingOptions(str(tmp_path / "llava"), processor=str(tmp_path / "gemma3"))
    with pytest.raises(FormatError, match="not a special token of the tokenizer"):
        RowEncoder(mixed)
    path = tmp_path / "llava" / "tokenizer.json"
    (tmp_path / "other").mkdir()
    shutil.copytree(tmp_path / "llava", tmp_path / "other", dirs_exist_ok=True)
    vocabulary = json.loads(path.read_text())
    ids = vocabulary["model"]["vocab"]
    first, second = made["llava"].tokenizer.tokenize(" what is here?")[:2]
    ids[first], ids[second] = ids[second], ids[first]
    path.write_text(json.dumps(vocabulary))
    with pytest.raises(FormatError, match="contains a different tokenizer"):
        RowEncoder(EncodingOptions(str(tmp_path / "other"), processor=str(tmp_path / "llava")))


def test_a_row_that_the_processor_does_not_take_is_a_bad_row_each_time(tmp_path: Path) -> None:
    """Audio Flamingo takes only one recording per text, whatever rows came before."""
    audio_flamingo(tmp_path)
    files = [wav(8_000 + 999 * seed, seed=seed) for seed in range(20)]
    rows = [asking("audio", *files[at : at + 1 + at % 2]) for at in range(18)] * 3
    piece, _ = encoded(encoder_of(tmp_path, on_bad_row="skip"), rows)
    assert [error.position for error in piece.bad_rows] == [at + 1 for at in range(len(rows)) if at % 18 % 2]
    assert all("they must match 1:1" in str(error) for error in piece.bad_rows)


class NumberedProcessor(LlavaProcessor):
    """A processor that writes the number of an image before it, like MiniCPM-V's."""

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **options: Any) -> str:
        return f"{image_idx}" + super().replace_image_token(image_inputs, image_idx, **options)


def test_where_images_of_a_text_are_numbered_rows_may_have_one(tmp_path: Path) -> None:
    AutoProcessor.register(type("NumberedConfig", (PreTrainedConfig,), {}), NumberedProcessor, exist_ok=True)
    plain = PROCESSORS["llava"](tmp_path)
    numbered = NumberedProcessor(
        plain.image_processor,
        plain.tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA,
    )
    numbered.save_pretrained(tmp_path)
    files = files_for("image")
    piece, _ = encoded(encoder_of(tmp_path, on_bad_row="skip"), [asking("image", *files[:at]) for at in (0, 1, 2, 1)])
    assert [error.position for error in piece.bad_rows] == [3]
    assert "rows with one image" in str(piece.bad_rows[0])
    assert [*map(len, piece.media)] == [0, 1, 1]


# ---- placeholders without a file ----


def test_a_placeholder_without_a_file_is_a_bad_row(made: Made) -> None:
    token = token_of(made)
    texts = {"joined": [token[:3], token[3:]], "spelt": ["what is ", token]}
    for name, parts in texts.items():
        row = asking(made.kind)
        row[0]["content"] = [{"type": "text", "text": each} for each in parts]
        for allowed in (False, True):
            encoder = encoder_of(made.folder, on_bad_row="skip", masks=MaskOptions(allow_control_tokens=allowed))
            for shown in ([], [files_for(made.kind)[1]]):
                with_file = [*row[0]["content"], *asking(made.kind, *shown)[0]["content"]]
                piece, blobs = encoded(encoder, [[{**row[0], "content": with_file}, row[1]]])
                if piece.bad_rows:
                    assert "more placeholders" in str(piece.bad_rows[0])
                    continue
                # There are only words, and the file has its own place.
                assert name == "joined" or not allowed  # some templates write a space between texts
                assert [blobs.data(item.blob) for item in piece.media[0]] == shown
                outside = np.ones(len(piece.input_ids), bool)
                for item in piece.media[0]:
                    outside[item.start : item.start + item.length] = False
                assert made.processor.tokenizer.convert_tokens_to_ids(token) not in piece.input_ids[outside]


def test_ids_of_images_and_audio_that_came_tokenised_are_a_bad_row(made: Made) -> None:
    token = made.processor.tokenizer.convert_tokens_to_ids(token_of(made))
    lines = [json.dumps({"input_ids": ids, "loss_mask": [0, 1]}).encode() + b"\n" for ids in ([60, 61], [60, token])]
    ends = np.cumsum([*map(len, lines)]) - 1
    piece = JsonPiece("rows.jsonl", 1, int(ends[-1]), b"".join(lines), ends, False)
    done = encoder_of(made.folder, on_bad_row="skip").encode(piece)
    assert [error.position for error in done.bad_rows] == [2]
    assert "image or audio tokens" in str(done.bad_rows[0])


# ---- files ----


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turned", range(1, 9))
def test_the_size_of_an_image_is_the_same_by_its_head_decoded_and_as_transformers_loads_it(
    tmp_path: Path, form: str, turned: int
) -> None:
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = turned
    Image.open(io.BytesIO(png(30, 17))).save(stream, form, exif=exif)
    (tmp_path / "image").write_bytes(stream.getvalue())
    loaded = load_image(str(tmp_path / "image"))
    data, limits = stream.getvalue(), MediaLimits()
    assert size_of_media("image", data, "it", limits) == (loaded.height, loaded.width)
    assert stored_size("image", data, limits) == (loaded.height, loaded.width)


@pytest.mark.parametrize("form", ["WAV", "WAVEX", "AIFF", "AU", "W64", "RF64", "FLAC", "OGG"])
def test_a_recording_that_is_cut_short_is_refused(form: str) -> None:
    rng, data, limits = random.Random(form), wav(5_000, form=form), MediaLimits()
    assert size_of_media("audio", data, "it", limits) == (5_000, 16_000)
    for length in rng.sample(range(1, len(data) - 1), 30):
        with pytest.raises(RowError):
            size_of_media("audio", data[:length], "it", limits)


def test_a_recording_whose_length_its_writer_did_not_know_is_read() -> None:
    """Programs that write to a pipe put the largest possible length into the header."""
    data = wav(5_000)
    at = data.index(b"data") + 4
    for length in (0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000):
        piped = data[:at] + struct.pack("<I", length) + data[at + 4 :]
        assert size_of_media("audio", piped, "it", MediaLimits()) == (5_000, 16_000)
