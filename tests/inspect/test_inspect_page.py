"""The inspector's page as a file: required and forbidden contents, and its size."""

from __future__ import annotations

import base64
import calendar
import hashlib
import html
import itertools
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import HOSTILE, Markup, colours, decode_hostile, markup_of, write_hostile
from sample_packs import demo_samples, sample_of, write_samples

from megatron_sft_idx import __version__
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect import page as pages
from megatron_sft_idx.inspect.page import MAX_NBYTES, logarithmic_ticks, make_page, nice_ticks
from megatron_sft_idx.inspect.summary import survey_shard
from megatron_sft_idx.inspect.text import token_texts
from megatron_sft_idx.shard import Shard, ShardWriter


def page_of(prefix: Path, decode: Any = None, **options: Any) -> bytes:
    shard = Shard(prefix)
    return make_page(shard, survey_shard(shard, **options), decode)


def attributes(page: Markup, name: str) -> list[str]:
    return [value or "" for _, attrs in page.tags for key, value in attrs.items() if key == name]


@pytest.mark.parametrize("count", [0, 1, 7, 60])
def test_every_link_leads_into_the_page(tmp_path: Path, count: int) -> None:
    write_samples(tmp_path / "x", demo_samples(count), capacity=64)
    page = markup_of(page_of(tmp_path / "x"))
    links, ids = attributes(page, "href"), attributes(page, "id")
    assert len(ids) == len(set(ids))
    assert links
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert {f"pack-{i}" for i in range(count) if count < 60} <= set(ids)
    assert [tag for tag, attrs in page.tags if tag == "th" and "scope" not in attrs] == []
    assert ("The token ids of all packs" in page.text["p"]) == (0 < count < 60)
    assert not {tag for tag, _ in page.tags} & {"img", "link", "iframe", "object", "form", "base", "embed"}
    assert not [
        key for _, attrs in page.tags for key in attrs if key in ("src", "style", "srcset") or key.startswith("on")
    ]


def test_links_of_sequences_lead_to_them_where_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = [sample_of([3, 2, 9], lambda p: 1, lambda p, i=i: 40 * i + p) for i in range(5)]
    write_samples(tmp_path / "x", packs, capacity=64)
    links = attributes(markup_of(page_of(tmp_path / "x")), "href")
    assert {f"#pack-{i}-sequence-2" for i in range(4)} <= set(links)
    monkeypatch.setattr(pages, "_SHOWN_TOKENS", 0)
    page = markup_of(page_of(tmp_path / "x"))
    assert [link for link in attributes(page, "href") if "sequence" in link] == []


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    write_hostile(tmp_path / "x")
    raw = page_of(tmp_path / "x", decode_hostile)
    page = markup_of(raw)
    tags = [tag for tag, _ in page.tags]
    assert (tags.count("script"), tags.count("style"), tags.count("img")) == (1, 1, 0)
    assert "hacked" not in page.text["script"] + page.text["style"]
    assert not [link for link in attributes(page, "href") if not link.startswith("#")]
    shown = page.text["div"] + page.text["mark"]
    for text in (HOSTILE[0], HOSTILE[1], HOSTILE[4]):
        assert text in shown
    assert not {c for c in raw.decode() if ord(c) < 32} - {"\n"}
    assert "49" not in shown  # data is never treated as a template


def test_only_its_own_style_and_script_may_run(tmp_path: Path) -> None:
    write_hostile(tmp_path / "x")
    page = markup_of(page_of(tmp_path / "x", decode_hostile))
    (policy,) = [attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.text[kind].encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"


def worst(name: str) -> tuple[list[Any], dict[str, Any]]:
    """Return shards that could make a page large."""
    if name == "one-token sequences":
        return [sample_of([1] * 20_000, lambda p: 0, lambda p: 65_000)] * 12, {}
    if name == "masks that flicker":
        return [sample_of([50_000], lambda p: p % 2, lambda p: 65_000)] * 12, {}
    if name == "long names":
        return demo_samples(), {
            "metadata": {"tokenizer": {"fingerprint": "<" * 10**6}, "options": {"<" * 10**6: "&" * 10**6}}
        }
    return [sample_of([30_000], lambda p: 1, lambda p: 65_000)] * 12, {}


@pytest.mark.parametrize("name", ["one-token sequences", "masks that flicker", "long names", "long packs"])
@pytest.mark.parametrize("decode", [None, lambda ids: "<&>\"'\x1b" * len(ids)])
def test_a_page_is_less_than_a_megabyte(tmp_path: Path, name: str, decode: Any) -> None:
    packs, options = worst(name)
    with ShardWriter(tmp_path / "x", durable=False, token_dtype=np.uint16, **options) as writer:
        for pack in packs:
            writer.add_pack(
                np.array(pack.tokens, np.uint16), np.array(pack.label_mask, np.uint8), np.array(pack.starts)
            )
    page = page_of(tmp_path / "x", decode)
    assert len(page) < MAX_NBYTES
    markup_of(page)


def test_the_command_for_other_packs_can_be_pasted(tmp_path: Path) -> None:
    write_samples(tmp_path / "it's <b>", demo_samples(), capacity=64)
    (shown,) = re.findall(r'<code class="command">(.*?)</code>', page_of(tmp_path / "it's <b>").decode())
    assert shlex.split(html.unescape(shown)) == [
        *("megatron-sft-idx", "inspect", str(tmp_path / "it's <b>"), "--pack", "0"),
    ]


def test_commands_name_a_tokenizer_if_they_print_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SHOWN_TOKENS", 300)
    packs = [sample_of([90], lambda p: 1, lambda p: p) for _ in range(60)]
    write_samples(tmp_path / "x", packs)
    shard = Shard(tmp_path / "x")
    text = make_page(shard, survey_shard(shard), lambda ids: "a" * len(ids), tokenizer="my tokenizer").decode()
    printing = [shlex.split(html.unescape(one)) for one in re.findall(r'<code class="command">(.*?)</code>', text)]
    assert all(words[3:5] == ["--tokenizer", os.path.abspath("my tokenizer")] for words in printing)
    numbers = [int(words[-1]) for words in printing]
    assert (
        numbers[0] not in numbers[1:]
    )  # the first is for a pack that is not on the page, the others are for packs on it
    assert f'id="pack-{numbers[0]}"' not in text
    assert {f'id="pack-{number}"' in text for number in numbers[1:]} == {True}


def test_what_is_cut_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SHOWN_TOKENS", 2_000)
    packs = [sample_of([3000, *[5] * 400], lambda p: p % 7 > 2, lambda p: p % 100) for _ in range(20)]
    write_samples(tmp_path / "x", packs)
    text = page_of(tmp_path / "x").decode()
    assert "more tokens" in text
    assert "more sequences" in text
    assert "--pack 7</code>" in text


def test_weights_other_than_one_are_named(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", [sample_of([4], lambda p: 0.25 * p, lambda p: p)], mask_dtype=np.float32)
    marks = [attrs for tag, attrs in markup_of(page_of(tmp_path / "x")).tags if tag == "mark"]
    assert {"title": "weight 0.25"} in marks


def test_the_page_of_a_shard_is_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(tmp_path / "x", demo_samples(), capacity=64)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1787564100")
    page = page_of(tmp_path / "x")
    assert page == page_of(tmp_path / "x")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1787564160")
    assert page.replace(b"page made 2026-08-24 09:35 UTC", b"page made 2026-08-24 09:36 UTC") == page_of(tmp_path / "x")
    for bad in ("now", "-1", "1" * 99):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", bad)
        with pytest.raises(FormatError, match=r"SOURCE_DATE_EPOCH: .*, expected a number of seconds since 1970"):
            page_of(tmp_path / "x")


def test_a_page_names_its_shard_its_time_and_its_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    for name, samples in (("full", demo_samples()), ("empty", [])):
        write_samples(tmp_path / name, samples, capacity=64)
        before = time.time() // 60 * 60
        page = markup_of(page_of(tmp_path / name))
        assert page.text["h1"] == name
        assert page.text["title"].startswith(f"{name}: ")
        assert str(tmp_path / name) in page.text["code"]
        assert f"megatron-sft-idx {__version__}" in page.text["span"]
        (made,) = re.findall(r"page made (\d{4}-\d\d-\d\d \d\d:\d\d) UTC", page.text["span"])
        assert before <= calendar.timegm(time.strptime(made, "%Y-%m-%d %H:%M")) <= time.time()


def titles(page: bytes) -> list[str]:
    """The values of the bars of the first chart, which shows the lengths of sequences."""
    first, *_ = re.findall(r"<figure>.*?</figure>", page.decode(), re.DOTALL)
    return re.findall(r"<title>(.*?)</title>", first)


def test_widely_spread_lengths_have_a_logarithmic_axis(tmp_path: Path) -> None:
    write_samples(tmp_path / "near", [sample_of([40, 50, 60, 100], lambda p: 0, lambda p: p)])
    write_samples(tmp_path / "far", [sample_of([4, 5, 6, 1000], lambda p: 0, lambda p: p)])
    near, far = page_of(tmp_path / "near"), page_of(tmp_path / "far")
    assert (b"logarithmic axis" in near, far.count(b"largest 1,000; logarithmic axis")) == (False, 2)
    assert titles(near)[-1] == "100 tokens: 1 sequence (25.0%)"
    assert titles(far) == [
        "4 to 5 tokens: 2 sequences (50.0%)",
        "6 to 7 tokens: 1 sequence (25.0%)",
        "708 to 1,000 tokens: 1 sequence (25.0%)",
    ]
    # Tick marks are as far apart as the powers of ten that they name.
    marks = dict(
        re.findall(
            r'<text class="x" x="([\d.]+)" y="184">(10|100|1,000)</text>', far.decode()[: far.index(b"</figure>")]
        )
    )
    left, middle, right = sorted(float(x) for x in marks)
    assert [marks[str(x).removesuffix(".0")] for x in (left, middle, right)] == ["10", "100", "1,000"]
    assert middle - left == pytest.approx(right - middle, abs=0.2)


def test_no_axis_reaches_beyond_what_there_can_be(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", [sample_of([7, 7], lambda p: int(p > 3), lambda p: p)], capacity=14)
    text = page_of(tmp_path / "x").decode()
    assert [int(number) for number in re.findall(r'y="184">(\d+)%<', text) if int(number) > 100] == []
    assert "<title>100%: 1 pack (100%)</title>" in text


@given(st.integers(1, 10**6), st.integers(2, 10**7), st.integers(3, 9))
def test_logarithmic_ticks_are_few_and_on_the_axis(low: int, high: int, most: int) -> None:
    ticks = logarithmic_ticks(low, max(low + 1, high), most)
    assert len(ticks) <= max(most + 1, 8)
    assert all(low <= value <= max(low + 1, high) for value, _ in ticks)
    if high >= 10 * low:
        assert ticks


def test_headings_and_controls_have_names(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(), capacity=64)
    page = markup_of(page_of(tmp_path / "x"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    named = {attrs.get("for") for tag, attrs in page.tags if tag == "label"}
    for tag, attrs in page.tags:
        if tag == "input":
            assert attrs["id"] in named
        if tag in ("button", "nav") or attrs.get("role") in ("img", "region"):
            assert attrs.get("aria-label")
    # Hints about keys and the search appear if the script runs.
    assert [attrs["class"] for tag, attrs in page.tags if "hidden" in attrs and "class" in attrs] == [
        *("note keys", "note choose", "search", "note"),
    ]


@given(st.floats(0, 1e12), st.floats(1e-3, 1e12), st.integers(1, 9), st.booleans())
def test_ticks_are_few_ascending_and_told_apart(low: float, span: float, most: int, whole: bool) -> None:
    if span < low * 1e-3:
        return  # no axis here has such a small range
    ticks = nice_ticks(low, low + span, most, whole=whole)
    values = [value for value, _ in ticks]
    assert len(ticks) <= most + 1
    assert values == sorted(values)
    assert all(low - span * 1e-6 <= value <= low + span * (1 + 1e-6) for value in values)
    if whole:
        assert all(abs(value - round(value)) < 1e-3 for value in values)
    if span > 1:
        assert len({text for _, text in ticks}) == len(ticks)


# ---- colours ----


def linear(colour: str) -> np.ndarray:
    raw = colour.lstrip("#")
    raw = "".join(c * 2 for c in raw) if len(raw) == 3 else raw
    values = np.array([int(raw[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


# Machado, Oliveira and Fernandes 2009, severity 1: colours seen by people without one kind of cones.
SEEN = {
    "all cones": np.eye(3),
    "no long": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no medium": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "no short": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Convert to Ottosson's OKLab, in which equal distances look about equally different."""
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    found: np.ndarray = lab @ np.cbrt(cones @ np.clip(rgb, 0, 1))
    return found


def contrast(one: str, other: str) -> float:
    lights = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (one, other))
    return lights[1] / lights[0]


def palette_of(mode: int) -> dict[str, str]:
    """Return the colours of a mode: light, dark or print. Colours that a mode does not set are as in light."""
    found = colours(pages._resource("page.css"))
    return found[0] | found[mode]


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_neighbouring_sequences_are_told_apart_by_every_eye(mode: int) -> None:
    palette = palette_of(mode)
    hues = [palette[f"s{i}"] for i in range(4)]
    for seen in SEEN.values():
        for one, other in itertools.pairwise([*hues, hues[0]]):
            assert np.linalg.norm(oklab(seen @ linear(one)) - oklab(seen @ linear(other))) > 0.1
    assert all(contrast(hue, palette["paper"]) > 3 for hue in hues)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_text_can_be_read_on_its_ground(mode: int) -> None:
    palette = palette_of(mode)
    pairs = [
        ("ink", "paper"),
        ("soft", "paper"),
        ("soft", "panel"),
        ("link", "paper"),
        ("mark-ink", "mark"),
        ("ink", "panel"),
    ]
    for ink, ground in [*pairs, ("hit-ink", "hit"), ("current-ink", "current")]:
        assert contrast(palette[ink], palette[ground]) >= 4.5, (ink, ground)


@pytest.mark.parametrize(
    ("part", "whole", "said"),
    [(0, 7, "0%"), (1, 2, "50.0%"), (1, 10**6, "0.1%"), (999_999, 10**6, "99.9%"), (3, 8, "37.5%"), (7, 7, "100%")],
)
def test_a_share_is_all_or_nothing_only_where_it_is(part: int, whole: int, said: str) -> None:
    assert pages._percent(part, whole) == said


def test_texts_of_tokens_make_up_the_whole() -> None:
    spelled = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b" b", 5: b"\x07"}

    def decode(ids: list[int]) -> str:  # like sentencepiece, without the space at the beginning of a text
        return b"".join(spelled[one] for one in ids).decode("utf-8", "replace").removeprefix(" ")

    found = token_texts(np.array([4, 1, 2, 3, 4, 5]), decode)
    assert found == [("b", [4]), ("a", [1]), ("é", [2, 3]), (" b", [4]), ("\u2407", [5])]
