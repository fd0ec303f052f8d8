"""Images in rows: ids as the model's own processor makes them, masks as without them, and what is refused."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_processors import PROCESSORS, conversation, png
from PIL import Image

from megatron_sft_idx.chat.inputs import JsonPiece
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.packs.run_media import BlobsByHash
from megatron_sft_idx.tokenize.encoding import EncodedPiece, EncodingOptions, RowEncoder

SIZES = [(28, 42), (64, 64), (100, 30), (17, 90), (200, 150), (14, 14)]


@pytest.fixture(scope="module", params=list(PROCESSORS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("processor")
    return folder, PROCESSORS[request.param](folder)


def encoder_of(folder: Path, **options: Any) -> RowEncoder:
    rows = RowOptions(media=True)
    return RowEncoder(EncodingOptions(str(folder), processor=str(folder), rows=rows, **options))


def images_of(messages: list[dict[str, Any]]) -> list[bytes]:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"]["bytes"] for part in parts if part["type"] == "image"]


def in_base64(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, as JSON can hold them."""
    import base64

    text = json.dumps(messages, default=lambda data: "data:image/png;base64," + base64.b64encode(data).decode())
    return json.loads(text)


def encoded(encoder: RowEncoder, rows: list[Any]) -> tuple[EncodedPiece, BlobsByHash]:
    lines = [json.dumps({"messages": in_base64(row)}).encode() + b"\n" for row in rows]
    ends = np.cumsum([len(line) for line in lines]) - 1
    piece, blobs = JsonPiece("rows.jsonl", 1, int(ends[-1]), b"".join(lines), ends, False), BlobsByHash()
    return encoder.encode(piece, media=encoder.media_of(piece.path, blobs)), blobs


def test_ids_are_those_of_the_processor(made: tuple[Path, Any]) -> None:
    folder, processor = made
    rng = random.Random(3)
    images = [png(*size, seed) for seed, size in enumerate(SIZES)]
    rows = [conversation(rng, images) for _ in range(200)]
    piece, blobs = encoded(encoder_of(folder), rows)
    assert not piece.bad_rows, piece.bad_rows[0]
    ends = np.cumsum(piece.lengths)
    for row, end, length, media in zip(rows, ends.tolist(), piece.lengths.tolist(), piece.media, strict=True):
        given = [{"role": each["role"], "content": parts_of(each["content"])} for each in row]
        text = processor.apply_chat_template(given, tokenize=False)
        shown = images_of(row)
        pictures = [Image.open(io.BytesIO(data)) for data in shown] or None
        expected = processor(text=[text], images=pictures, add_special_tokens=False)["input_ids"][0]
        ids = piece.input_ids[end - length : end]
        assert ids.tolist() == list(expected)
        assert [blobs.data(item.blob) for item in media] == shown
        token = processor.tokenizer.convert_tokens_to_ids("<image>")
        inside = np.zeros(length, bool)
        for item in media:
            assert not inside[item.start : item.start + item.length].any()
            inside[item.start : item.start + item.length] = True
        assert inside[ids == token].all()
        assert not piece.loss_mask[end - length : end][inside].any()


def parts_of(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
