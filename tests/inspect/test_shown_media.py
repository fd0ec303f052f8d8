"""Images and audio in the output of ``inspect``, in its page, and in a dry run."""

from __future__ import annotations

import base64
import builtins
import io
import json
import random
import re
import sys
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from chats import command
from media_processors import llava, png
from media_samples import MediaSample, item_of, media_sample, media_samples, write_media
from pages import HOSTILE, Markup, decode_hostile, markup_of
from PIL import Image, PngImagePlugin
from sample_packs import sample_of

from megatron_sft_idx import show_pack
from megatron_sft_idx.inspect import page as pages
from megatron_sft_idx.inspect import shown_media
from megatron_sft_idx.inspect.diff import compare_shards
from megatron_sft_idx.inspect.page import MAX_NBYTES, make_page
from megatron_sft_idx.inspect.shown_media import MAX_THUMBNAIL_NBYTES, MAX_THUMBNAILS_NBYTES, shown_items
from megatron_sft_idx.inspect.summary import survey_shard
from megatron_sft_idx.inspect.text import folded_in, mark_pack, marked_spans, trained_tokens
from megatron_sft_idx.shard import Shard


def wav(samples: int, rate: int = 8000) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, np.zeros(samples, np.float32), rate, format="WAV")
    return stream.getvalue()


def bomb() -> bytes:
    """Return a PNG of a hundred bytes that claims to have 10^10 pixels."""
    stream = io.BytesIO()
    Image.new("L", (1, 1)).save(stream, "PNG")
    raw = bytearray(stream.getvalue())
    raw[16:24] = (100_000).to_bytes(4, "big") * 2
    raw[29:33] = zlib.crc32(raw[12:29]).to_bytes(4, "big")
    return bytes(raw)


def page_of(prefix: Path, decode: Any = None) -> Markup:
    shard = Shard(prefix)
    page = make_page(shard, survey_shard(shard), decode)
    assert len(page) < MAX_NBYTES
    return markup_of(page)


def boxes(page: Markup) -> list[str]:
    """Return the words in the boxes of images and audio."""
    return [text for text in re.split(r"(?=image, |audio, )", page.text.get("span", "")) if " position" in text]


def shown_packs(prefix: Path) -> list[pages.ShownPack]:
    shard = Shard(prefix)
    context = pages._context(shard, survey_shard(shard), None, pages._SHOWN_TOKENS, shown_media.Thumbnails())
    return list(context["packs"])


def pictures(page: Markup) -> list[Any]:
    """Return the images of the page, decoded."""
    found = []
    for tag, attrs in page.tags:
        if tag == "img":
            head, comma, body = (attrs["src"] or "").partition(",")
            assert (head, comma) == ("data:image/jpeg;base64", ",")
            assert len(body) <= 4 * MAX_THUMBNAIL_NBYTES // 3 + 4
            picture = Image.open(io.BytesIO(base64.b64decode(body, validate=True)))
            picture.load()
            assert (attrs["width"], attrs["height"]) == (str(picture.width), str(picture.height))
            found.append(picture)
    return found


# ---- text ----


@pytest.mark.parametrize("seed", range(30))
def test_placeholders_are_folded_and_all_else_is_as_without(seed: int) -> None:
    """Each position is shown once, as its id or inside its item, and marks follow the mask."""
    for sample in media_samples(seed):
        pack = sample.pack
        ids, mask = np.array(pack.tokens), np.array(pack.label_mask, np.uint8)
        shown: list[tuple[str, float]] = []
        for start, stop in pairwise(pack.bounds):
            folded = folded_in(sample.items, start, stop)
            for span in marked_spans(ids[start:stop], trained_tokens(mask[start:stop]), ids_apart, folded):
                if span.item is None:
                    shown += [(word, span.weight) for word in span.text.split()]
                else:
                    item = sample.items[span.item]
                    assert span.text == f"<{item.kind} x {item.length}>"
                    assert span.length == item.length
                    shown += [(item.kind, span.weight)] * span.length
        at = {p: item.kind for item in sample.items for p in range(item.start, item.start + item.length)}
        trained = np.concatenate([trained_tokens(mask[a:b]) for a, b in pairwise(pack.bounds)]).tolist()
        assert shown == [(at.get(p, str(pack.tokens[p])), trained[p]) for p in range(len(pack.tokens))]


def ids_apart(ids: Any) -> str:
    return "".join(f"{number} " for number in ids)


def test_marks_are_exact_where_a_mask_is_set_inside_an_item() -> None:
    items = [item_of("image", 1, 6), item_of("image", 7, 2)]
    shown = mark_pack(np.arange(10), np.array([0, 0, 0, 1, 0, 0, 0, 0, 1, 0]), [0, 10], ids_apart, media=items)
    assert shown.split("\n")[1] == "0 <image x 3>[[<image x 1>]]<image x 2><image x 2>[[9 ]]"


def test_a_notebook_folds_them_too(tmp_path: Path) -> None:
    write_media(tmp_path / "x", [media_sample([8, 3], [item_of("audio", 1, 5)])])
    shown = show_pack(Shard(tmp_path / "x")[0])
    assert "<audio x 5>" in repr(shown)
    assert "&lt;audio x 5&gt;" in shown._repr_html_()


# ---- printed ----


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """Provide three packs: two images and a recording; the first image again and an invalid file; nothing."""
    first, second, sound = png(40, 30), png(200, 10), wav(12_000)
    packs = [
        media_sample(
            [9, 4], [item_of("image", 1, 4, first), item_of("image", 6, 2, second), item_of("audio", 10, 2, sound)]
        ),
        media_sample([7], [item_of("image", 0, 3, first), item_of("image", 4, 2, b"no image")]),
        media_sample([2], []),
    ]
    write_media(tmp_path / "x", packs)
    return tmp_path / "x"


def test_the_summary_counts_images_and_audio(seen: Path) -> None:
    line = next(line for line in command("inspect", seen).out.splitlines() if line.startswith("images and audio"))
    nbytes = Path(f"{seen}.media.data").stat().st_size
    assert line.split(maxsplit=3)[3] == (
        f"4 images and 1 recording at 13 positions; 4 distinct files, {nbytes:,} bytes; 1 of 5 items repeats a file"
    )
    found = json.loads(command("inspect", seen, "--json").out)
    assert found["media"] == {
        **{"images": 4, "recordings": 1, "positions": 13, "files": 4, "nbytes": nbytes, "repeats": 1}
    }
    assert found["nbytes"][".media.items"] == Path(f"{seen}.media.items").stat().st_size


def test_a_line_for_each_item_of_a_pack(seen: Path) -> None:
    sizes = [len(item.data) for pack in (0, 1) for item in Shard(seen)[pack]["media"]]
    assert [line for line in command("inspect", seen, "--pack", 0).out.splitlines() if line.startswith("item")] == [
        f"item 0: image, sequence 0, positions 1 to 4, 40 x 30 pixels, {sizes[0]:,} bytes",
        f"item 1: image, sequence 0, positions 6 to 7, 200 x 10 pixels, {sizes[1]:,} bytes",
        f"item 2: audio, sequence 1, positions 10 to 11, 1.50 seconds, {sizes[2]:,} bytes",
    ]
    out = command("inspect", seen, "--pack", 1).out
    assert f"positions 0 to 2, 40 x 30 pixels, {sizes[3]:,} bytes, the same file as item 0 of pack 0\n" in out
    assert re.search(r"positions 4 to 5, 8 bytes, the image cannot be decoded: ", out)
    assert "<image x 3>" in out
    found = json.loads(command("inspect", seen, "--pack", 1, "--json").out)
    assert found["media"][0] == {
        **{"kind": "image", "sequence": 0, "start": 0, "length": 3, "nbytes": sizes[3], "width": 40, "height": 30},
        "same_as": {"pack": 0, "item": 0},
    }
    assert found["sequences"][0]["input_ids"] == Shard(seen)[1]["input_ids"].tolist()
    assert "item" not in command("inspect", seen, "--pack", 2).out


@pytest.mark.parametrize("seed", range(10))
def test_the_first_item_with_a_file_is_found(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_media, "_CHUNK_ITEMS", 3)
    samples = media_samples(seed, 20)
    write_media(tmp_path / "x", samples)
    firsts: dict[bytes, tuple[int, int]] = {}
    shard = Shard(tmp_path / "x")
    for pack, sample in enumerate(samples):
        for number, (item, shown) in enumerate(zip(sample.items, shown_items(shard, pack), strict=True)):
            first = firsts.setdefault(bytes(item.data), (pack, number))
            assert shown.same_as == (None if first == (pack, number) else first)


# ---- two shards ----


def test_other_images_are_a_difference(tmp_path: Path) -> None:
    rng = random.Random(5)
    samples = [sample for sample in media_samples(3, 30) if sample.items]
    write_media(tmp_path / "x", samples)
    changed = list(samples)
    at = rng.randrange(len(samples))
    items = list(samples[at].items)
    items[-1] = item_of(items[-1].kind, items[-1].start, items[-1].length, b"another file")
    changed[at] = MediaSample(samples[at].pack, items)
    write_media(tmp_path / "y", changed)
    write_media(tmp_path / "z", samples)
    found = command("inspect", tmp_path / "x", "--diff", tmp_path / "y")
    assert found.code == 1
    assert f"images and audio: 1 pack with the same number differs, the first is pack {at}: " in found.out
    same = compare_shards(Shard(tmp_path / "x"), Shard(tmp_path / "z"))
    assert same.same
    assert same.media == ""


def test_sequences_with_other_images_are_not_the_same_set(tmp_path: Path) -> None:
    one, other = (media_sample([5], [item_of("image", 1, 2, data)]) for data in (b"one", b"other"))
    more = media_sample([3], [])
    write_media(tmp_path / "x", [one, more])
    write_media(tmp_path / "y", [more, other])
    write_media(tmp_path / "z", [more, one])
    here = Shard(tmp_path / "x")
    assert compare_shards(here, Shard(tmp_path / "y")).sequences.other_mask == 1  # type: ignore[union-attr]
    assert compare_shards(here, Shard(tmp_path / "z")).sequences.same  # type: ignore[union-attr]


# ---- the page ----


def test_images_stand_in_the_text_of_the_page(seen: Path) -> None:
    page = page_of(seen)
    assert [picture.size for picture in pictures(page)] == [(40, 30), (160, 8), (40, 30)]
    found = boxes(page)
    assert len(found) == 5
    assert found[0].startswith("image, 40 x 30 pixels, ")
    assert "audio, 1.50 seconds, " in found[2]
    assert "the same file as item 0 of pack 0" in found[3]
    assert "the image cannot be decoded: 'cannot identify image file'" in found[4]
    (policy,) = [attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    assert "img-src data:;" in (policy or "")
    assert "default-src 'none'" in (policy or "")
    # The ids of the placeholders are not in the text.
    assert "0 1 2 3 4" not in page.text["div"]


def image_of(mode: str, form: str) -> bytes:
    stream = io.BytesIO()
    Image.linear_gradient("L").resize((90, 60)).convert(mode).save(stream, form)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        *[("L", form) for form in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")],
        *[(mode, "PNG") for mode in ("1", "P", "LA", "RGBA", "I;16")],
        *[("CMYK", "JPEG"), ("F", "TIFF"), ("I", "TIFF"), ("CMYK", "TIFF"), ("YCbCr", "TIFF")],
    ],
)
def test_every_kind_of_image_has_its_picture(tmp_path: Path, mode: str, form: str) -> None:
    if mode == "I;16":
        stream = io.BytesIO()
        Image.fromarray(np.arange(5400, dtype=np.uint16).reshape(60, 90)).save(stream, "PNG")
        data = stream.getvalue()
    else:
        data = image_of(mode, form)
    write_media(tmp_path / "x", [media_sample([4], [item_of("image", 1, 2, data)])])
    (picture,) = pictures(page_of(tmp_path / "x"))
    assert picture.size == (90, 60)
    assert picture.getextrema()[0][0] < picture.getextrema()[0][1]


def test_a_bomb_is_refused_by_its_head(tmp_path: Path) -> None:
    write_media(tmp_path / "x", [media_sample([4], [item_of("image", 1, 2, bomb())])])
    page = page_of(tmp_path / "x")
    assert pictures(page) == []
    assert len(boxes(page)) == 1
    large = png(40, 30)
    write_media(tmp_path / "y", [media_sample([4], [item_of("image", 1, 2, large)])])
    assert len(pictures(page_of(tmp_path / "y"))) == 1


def test_what_is_too_large_for_a_picture_is_a_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_media, "_LIMITS", shown_media.MediaLimits(max_pixels=1000))
    write_media(tmp_path / "x", [media_sample([4], [item_of("image", 1, 2, png(40, 30))])])
    page = page_of(tmp_path / "x")
    assert pictures(page) == []
    assert "an image of 40 x 30 pixels, more than 1,000" in boxes(page)[0]


@pytest.mark.parametrize("cut", [0.2, 0.6, 0.99])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_damaged_images_are_boxes(tmp_path: Path, form: str, cut: float) -> None:
    stream = io.BytesIO()
    Image.open(io.BytesIO(png(64, 64))).save(stream, form)
    data = bytearray(stream.getvalue())
    noise = random.Random(cut)
    for _ in range(20):
        data[noise.randrange(len(data))] ^= 255
    files = [stream.getvalue()[: int(len(data) * cut)], bytes(data)]
    write_media(tmp_path / "x", [media_sample([4], [item_of("image", 1, 2, each)]) for each in files])
    page = page_of(tmp_path / "x")
    assert len(boxes(page)) == 2
    assert len(pictures(page)) <= 2


def test_a_file_without_its_hash_is_said_to_be_damaged(seen: Path) -> None:
    path = Path(f"{seen}.media.data")
    raw = bytearray(path.read_bytes())
    raw[60] ^= 1
    path.write_bytes(raw)
    page = page_of(seen)
    assert len(pictures(page)) == 1
    assert sum("do not have their hash (rule M11)" in box for box in boxes(page)) == 2
    assert "rule M11" in command("inspect", seen, "--pack", 0).out


def test_hostile_images_stay_text(tmp_path: Path) -> None:
    info = PngImagePlugin.PngInfo()
    for text in HOSTILE[:3]:
        info.add_text("Title", text)
        info.add_text("Comment", text)
    stream = io.BytesIO()
    Image.open(io.BytesIO(png(20, 20))).save(stream, "PNG", pnginfo=info)
    files = [stream.getvalue(), *(text.encode() for text in HOSTILE), b"RIFF" + HOSTILE[0].encode()]
    kinds = ["image", *["image", "audio"] * 3]
    packs = [media_sample([6], [item_of(kind, 1, 3, data)]) for kind, data in zip(kinds, files, strict=False)]
    write_media(tmp_path / "x", packs)
    page = page_of(tmp_path / "x", decode_hostile)
    tags = [tag for tag, _ in page.tags]
    assert (tags.count("script"), tags.count("style"), tags.count("img")) == (1, 1, 1)
    assert {attrs["src"][:23] for tag, attrs in page.tags if tag == "img" and attrs["src"]} == {
        "data:image/jpeg;base64,"
    }
    assert not [key for _, attrs in page.tags for key in attrs if key in ("style", "srcset") or key.startswith("on")]
    assert "hacked" not in page.text["script"] + page.text["style"]


@pytest.mark.parametrize("decode", [None, pytest.param(decode_hostile, marks=pytest.mark.slow)])
def test_a_page_of_many_images_is_less_than_a_megabyte(tmp_path: Path, decode: Any) -> None:
    files = [png(300, 200 + i, i) for i in range(80)]  # noise, which JPEG cannot compress well
    packs = [
        media_sample([300], [item_of("image", 4 * k, 3, files[(7 * i + k) % 80]) for k in range(70)]) for i in range(90)
    ]
    write_media(tmp_path / "x", packs)
    page = page_of(tmp_path / "x", decode)
    shown, used = pictures(page), sum(len(attrs["src"] or "") for tag, attrs in page.tags if tag == "img")
    assert MAX_THUMBNAILS_NBYTES / 2 < used <= MAX_THUMBNAILS_NBYTES
    assert len(shown) > 20
    # Every pack has its share of images, and every other image is a box.
    by_pack = {
        pack.number: sum(picture.thumbnail is not None for picture in pack.pictures)
        for pack in shown_packs(tmp_path / "x")
    }
    assert min(by_pack.values()) > 0
    assert "no room left for its small picture" in page.text["span"]


def test_images_count_little_of_the_text_of_a_page(tmp_path: Path) -> None:
    """An image of a thousand positions does not hide the text after it."""
    packs = [media_sample([4000], [item_of("image", 10 + 1200 * k, 1000, png(30, 30, k)) for k in range(3)])] * 60
    write_media(tmp_path / "x", packs)
    page = page_of(tmp_path / "x")
    assert len(pictures(page)) == 3 * len([1 for tag, attrs in page.tags if tag == "details"])


def test_without_pillow_and_soundfile_there_are_boxes(seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refused(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] in ("PIL", "soundfile"):
            raise ImportError(name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.partition(".")[0] in ("PIL", "soundfile")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(builtins, "__import__", refused)
    page = page_of(seen)
    monkeypatch.undo()
    assert [tag for tag, _ in page.tags if tag == "img"] == []
    found = boxes(page)
    assert len(found) == 5
    assert re.match(r"image, [\d.]+ (B|KiB), 4 positions", found[0])
    assert re.match(r"audio, [\d.]+ (B|KiB), 2 positions", found[2])


def test_a_shard_without_media_has_the_stricter_page(tmp_path: Path) -> None:
    from sample_packs import write_samples

    write_samples(tmp_path / "x", [sample_of([5], lambda p: 1, lambda p: p)])
    page = page_of(tmp_path / "x")
    assert "img-src" not in str([attrs for tag, attrs in page.tags if tag == "meta"])
    assert pages.MAX_NBYTES == MAX_NBYTES


# ---- before packing ----


def test_a_dry_run_folds_the_first_sequence(tmp_path: Path) -> None:
    processor = tmp_path / "processor"
    llava(processor)
    uri = "data:image/png;base64," + base64.b64encode(png(28, 42)).decode()
    rows = {"messages": [{"role": "user", "content": "<image>hello"}, {"role": "assistant", "content": "the cat"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**rows, "images": [uri]}) + "\n")
    given = ["--input", tmp_path / "rows.jsonl", "--tokenizer-model", processor, "--processor", processor]
    found = command("preprocess", *given, "--seq-length", 512, "--dry-run", "--workers", 0)
    assert found.code == 0, found.err
    shown = found.out.split("marked:\n")[1]
    assert shown.count("<image x 16>") == 1
    assert shown.count("<image") == 1
    assert "[[ the cat]]" in shown
