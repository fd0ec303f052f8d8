"""Preference pairs with images: both answers have the prompt's images, and ids equal the processor's."""

from __future__ import annotations

import base64
import io
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import command
from media_processors import PROCESSORS, png
from PIL import Image

from megatron_sft_idx.chat.preferences import read_judged
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.shard import Shard

SIZES = [(28, 42), (64, 64), (100, 30), (17, 90), (14, 14)]
FILES = [png(*size, seed) for seed, size in enumerate(SIZES)]
ANSWERS = ["hi", "the cat", "on the mat", "hello world", "row col"]


@pytest.fixture(scope="module", params=[name for name in PROCESSORS if name != "qwen2-audio"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("processor")
    return folder, PROCESSORS[request.param](folder)


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


Pair = tuple[dict[str, Any], list[dict[str, Any]], list[str], list[bytes]]


def drawn(rng: random.Random) -> Pair:
    """Draw a row in one of the forms of data sets, with its prompt for the processor, two answers, and images."""
    files = [rng.choice(FILES) for _ in range(rng.randint(1, 3))]
    words = rng.choice(["what is here?", "the cat", "hello"])
    good, bad = rng.sample(ANSWERS, 2)
    asked = [*({"type": "image"} for _ in files), text(words)]
    prompt = [{"role": "user", "content": asked}]
    uris = [uri(data) for data in files]
    own = [{"role": "user", "content": [*({"type": "image", "image": each} for each in uris), text(words)]}]
    answers = [[{"role": "assistant", "content": [text(each)]}] for each in (good, bad)]
    plain = [[{"role": "assistant", "content": each}] for each in (good, bad)]
    form = rng.randrange(7)
    if form == 0:  # TRL
        row = {"images": uris, "prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    elif form == 1:  # TRL, whole conversations
        row = {"images": uris, "chosen": prompt + answers[0], "rejected": prompt + answers[1]}
    elif form == 2:  # TRL, files without places
        row = {"images": uris, "prompt": [{"role": "user", "content": words}], "chosen": plain[0], "rejected": plain[1]}
    elif form == 3:  # ms-swift
        tags = "<image>" * len(files) + words
        row = {"messages": [{"role": "user", "content": tags}, *plain[0]], "rejected_response": bad, "images": uris}
    elif form == 4:  # files in the parts, in both conversations
        row = {"chosen": own + answers[0], "rejected": own + answers[1]}
    elif form == 5:  # files in the parts of the prompt, strings
        row = {"prompt": own, "chosen": good, "rejected": bad}
    else:  # LLaMA-Factory
        turns = [{"from": "human", "value": "<image>" * len(files) + words}]
        row = {"conversations": turns, "images": uris}
        row |= {name: {"from": "gpt", "value": each} for name, each in (("chosen", good), ("rejected", bad))}
    return row, prompt, [good, bad], files


def test_ids_of_both_answers_are_those_of_the_processor(made: tuple[Path, Any], tmp_path: Path) -> None:
    folder, processor = made
    rng = random.Random(11)
    pairs = [drawn(rng) for _ in range(60)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row, *_ in pairs))
    given = ["--input", path, "--tokenizer-model", folder, "--processor", folder, "--row-kind", "preference"]
    found = command("preprocess", *given, "--seq-length", 8192, "--workers", 0, "--output-prefix", tmp_path / "x")
    assert found.code == 0, found.err
    shard = Shard(tmp_path / "x", columns=["pair", "source"])
    seen = 0
    for number in range(len(shard)):
        pack = shard[number]
        bounds = pack["seq_boundaries"].tolist()
        for at, (start, stop) in enumerate(pairwise(bounds)):
            _, prompt, answers, files = pairs[pack["source"][at][1]]
            side = int(pack["pair"][at][1])
            chat = [*prompt, {"role": "assistant", "content": [text(answers[side])]}]
            rendered = processor.apply_chat_template(chat, tokenize=False)
            pictures = [Image.open(io.BytesIO(data)) for data in files]
            expected = processor(text=[rendered], images=pictures, add_special_tokens=False)["input_ids"][0]
            assert pack["input_ids"][start:stop].tolist() == list(expected)
            items = [item for item in pack["media"] if start <= item.start < stop]
            assert [bytes(item.data) for item in items] == files
            mask, ids = pack["loss_mask"][start:stop], pack["input_ids"][start:stop]
            trained = processor.tokenizer.decode(ids[1:][mask[:-1] != 0])
            assert answers[side] in trained
            seen += 1
    assert seen == 2 * len(pairs)
    assert shard.media is not None
    assert len(shard.media) == len({data for *_, files in pairs for data in files})


def test_pairs_of_bytes_come_from_parquet(made: tuple[Path, Any], tmp_path: Path) -> None:
    """Images as stored by Hugging Face: structs of bytes and path, and parts with other keys null."""
    folder, _ = made
    asked = [{"type": "image", "text": None}, {"type": "text", "text": "hello"}]
    rows = [
        {
            "images": [{"bytes": FILES[i % 5], "path": None}],
            "prompt": [{"role": "user", "content": asked}],
            "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "hi"}]}],
            "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "the cat"}]}],
        }
        for i in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    given = ["--input", tmp_path / "rows.parquet", "--tokenizer-model", folder, "--processor", folder]
    given += ["--row-kind", "preference", "--seq-length", 8192, "--workers", 0, "--output-prefix", tmp_path / "x"]
    found = command("preprocess", *given)
    assert found.code == 0, found.err
    shard = Shard(tmp_path / "x")
    assert sum(len(pack["media"]) for pack in shard) == 16
    assert shard.media is not None
    assert len(shard.media) == 5


def pair_of(**row: Any) -> Any:
    return read_judged(row, RowOptions(media=True, kind="preference"))[0]


def test_what_is_no_pair_of_the_same_images_is_refused() -> None:
    asked = [{"role": "user", "content": "<image>hello"}]
    good, bad = ([{"role": "assistant", "content": each}] for each in ("hi", "the cat"))
    one, two = uri(FILES[0]), uri(FILES[1])
    with pytest.raises(RowError, match="rejected_images and images differ"):
        pair_of(messages=asked + good, rejected_response="the cat", images=[one], rejected_images=[two])
    with pytest.raises(RowError, match="image 2 in the messages has no file"):
        pair_of(prompt=asked, chosen="see <image>", rejected="the cat", images=[one])
    with pytest.raises(RowError, match="images has 2 files, but the messages have 1 placeholders"):
        pair_of(prompt=asked, chosen=good, rejected=bad, images=[one, two])
    own = [[{"role": "user", "content": [{"type": "image", "image": each}, text("hello")]}] for each in (one, two)]
    with pytest.raises(RowError, match=r"no common prompt|the first message in which they differ"):
        pair_of(chosen=own[0] + good, rejected=own[1] + bad)
    with pytest.raises(RowError, match="the row has videos; only images and audio are supported"):
        pair_of(prompt=asked, chosen=good, rejected=bad, images=[one], videos=["a.mp4"])
    chosen, rejected = pair_of(chosen=own[0] + good, rejected=own[0] + bad)
    assert chosen.messages[0] == rejected.messages[0]


def test_without_a_processor_images_are_refused() -> None:
    asked = [{"role": "user", "content": "hello"}]
    with pytest.raises(RowError, match="the row has images; pass --processor FOLDER to read images"):
        read_judged(
            {"prompt": asked, "chosen": "hi", "rejected": "no", "images": ["a.png"]}, RowOptions(kind="preference")
        )


def test_rows_of_kto_have_images_too(made: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = made
    rows = [
        {"prompt": "<image>hello", "completion": ANSWERS[i % 5], "images": [uri(FILES[i % 5])], "label": i % 2 == 0}
        for i in range(10)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--input", path, "--tokenizer-model", folder, "--processor", folder, "--row-kind", "kto"]
    found = command("preprocess", *given, "--seq-length", 8192, "--workers", 0, "--output-prefix", tmp_path / "x")
    assert found.code == 0, found.err
    shard = Shard(tmp_path / "x", columns=["label", "source"])
    for pack in shard:
        bounds = pack["seq_boundaries"]
        at = np.searchsorted(bounds, [item.start for item in pack["media"]], "right") - 1
        assert at.tolist() == [*range(len(bounds) - 1)]
        rows_of = pack["source"][:, 1].tolist()
        assert [bytes(item.data) for item in pack["media"]] == [FILES[row % 5] for row in rows_of]
        assert pack["label"].reshape(-1).tolist() == [int(row % 2 == 0) for row in rows_of]


def test_copies_of_pairs_are_one_row_wherever_their_images_stand(made: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = made
    own = {"type": "image", "image": uri(FILES[0])}
    prompt = [{"role": "user", "content": [own, text("hello")]}]
    answers = [[{"role": "assistant", "content": each}] for each in ("hi", "the cat")]
    rows = [
        {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]},
        {"chosen": prompt + answers[0], "rejected": prompt + answers[1]},
        {"prompt": [{"role": "user", "content": "<image>hello"}], "images": [uri(FILES[0])]}
        | {"chosen": "hi", "rejected": "the cat"},
        {"prompt": [{"role": "user", "content": "<image>hello"}], "images": [uri(FILES[1])]}
        | {"chosen": "hi", "rejected": "the cat"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--input", path, "--tokenizer-model", folder, "--processor", folder, "--row-kind", "preference"]
    given += ["--seq-length", 8192, "--workers", 0, "--output-prefix", tmp_path / "x", "--dedup", "exact"]
    found = command("preprocess", *given)
    assert found.code == 0, found.err
    assert Shard(tmp_path / "x").header.num_sequences == 4
