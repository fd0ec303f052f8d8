"""The inspector's page in Chromium: clicked, read, walked through by keyboard, in the dark, on paper.

``make test-browser`` installs what this needs and keeps screenshots in build/screenshots; elsewhere, what is missing
skips it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TOKENIZER, command, preprocess
from pages import HOSTILE, decode_hostile, write_hostile
from sample_packs import Sample, sample_of, write_samples

from megatron_sft_idx.inspect.page import make_page
from megatron_sft_idx.inspect.summary import survey_shard
from megatron_sft_idx.shard import Shard, ShardWriter

pytestmark = pytest.mark.browser

REQUIRED = os.environ.get("SFT_IDX_BROWSER") == "1"  # set by make test-browser: what is missing is then a failure
SHOTS = Path(__file__).parents[2] / "build/screenshots"
OFFLINE = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        assert not REQUIRED, "playwright or chromium is missing"
        pytest.skip("needs playwright and chromium: make test-browser installs them")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OFFLINE)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    assert preprocess(folder / "chats").code == 0
    path = folder / "demo.html"
    assert command("inspect", folder / "chats", "--tokenizer", TOKENIZER, "--html", path).code == 0
    return path


def opened(chromium: Any, path: Path, **options: Any) -> Any:
    """The page in a context of its own, which fails the test on any error and any request but for the page itself."""
    page = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}).new_page()
    page.set_default_timeout(20_000)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("dialog", lambda dialog: page.problems.append(dialog.message))
    page.on("request", lambda request: request.url.startswith(path.as_uri()) or page.problems.append(request.url))
    page.goto(path.as_uri())
    return page


def kept(page: Any, name: str) -> None:
    if REQUIRED:
        page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


def focused_pack(page: Any) -> str:
    return str(page.evaluate("document.activeElement.closest('details.pack')?.id ?? ''"))


def test_it_shows_what_the_shard_holds(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo)
    shard = Shard(demo.parent / "chats")
    assert page.title() == f"chats: {len(shard)} packs"
    assert f"{shard.header.num_sequences} sequences" in page.inner_text("header")
    assert page.locator("figure svg").count() == 6
    assert page.locator("#pack-0").get_attribute("open") is not None
    trained = page.locator("#pack-0 mark").all_inner_texts()
    assert trained
    assert all("<|im_start|>" not in text for text in trained)
    ids, mask = shard.sequences(0)[0]
    share = f"{np.count_nonzero(mask)} of {len(ids)} tokens trained ({100 * np.count_nonzero(mask) / len(ids):.1f}%)"
    assert share in page.locator("#pack-0 h4").first.inner_text()
    boxes = [
        page.locator(selector).first.bounding_box() for selector in ("table.packs path.t0", "#pack-0 path.t0", ".bar")
    ]
    assert all(box and box["width"] > 1 and box["height"] > 1 for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.problems == []
    kept(page, "demo-light")


def test_links_open_the_packs_they_lead_to(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo)
    link = page.locator("#odd a:not([href*=sequence])").first
    number = link.get_attribute("href").removeprefix("#")
    target = page.locator(f"#{number}")
    page.evaluate("document.querySelectorAll('details').forEach(pack => { pack.open = false })")
    for _ in range(2):  # the second time the address does not change
        link.click()
        page.wait_for_function("id => document.activeElement.closest('details.pack')?.id === id", arg=number)
        assert target.get_attribute("open") is not None
        assert target.locator(".text").first.is_visible()
        assert 0 <= target.bounding_box()["y"] < 900
        target.locator("summary").click()
        assert target.get_attribute("open") is None
    assert page.problems == []


def test_ids_show_on_hover(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo)
    shard = Shard(demo.parent / "chats")
    text = page.locator("#pack-0 .text").first
    before = text.inner_text()
    text.locator("mark").first.hover()
    ids = [int(one) for title in text.locator("span").evaluate_all("all => all.map((one) => one.title)")
           for one in title.split()]  # fmt: skip
    assert ids == shard.sequences(0)[0][0].tolist()
    assert text.inner_text() == before
    assert page.problems == []


def test_packs_are_chosen_and_ordered(chromium: Any, tmp_path: Path) -> None:
    packs = [
        sample_of([4 + i, 5], lambda p, i=i: int(p > 0) * (i % 3 > 0) * (p % max(i % 3, 1) == 0), lambda p: p)
        for i in range(9)
    ]
    write_samples(tmp_path / "x", packs, capacity=64)
    path = tmp_path / "x.html"
    path.write_bytes(make_page(Shard(tmp_path / "x"), survey_shard(Shard(tmp_path / "x"))))
    page = opened(chromium, path)

    def shown() -> list[int]:
        ids = page.locator("details.pack:visible").evaluate_all("packs => packs.map((pack) => pack.id)")
        return [int(name.removeprefix("pack-")) for name in ids]

    for kind, numbers in (("none", [0, 3, 6]), ("all", [1, 4, 7]), ("part", [2, 5, 8]), ("", [*range(9)])):
        page.select_option("#trained", kind)
        assert shown() == numbers
        if kind in ("none", "all"):
            assert f"{kind} trained" in page.inner_text(f"#pack-{numbers[0]} summary")
    page.select_option("#order", "share")
    assert shown()[:3] == [0, 3, 6]
    page.select_option("#order", "-share")
    assert sorted(shown()[-3:]) == [0, 3, 6]
    page.select_option("#order", "-length")
    assert shown() == [*range(8, -1, -1)]
    page.select_option("#order", "length")
    assert shown() == [*range(9)]
    page.fill("#text", "positions 0 to 6,")
    assert shown() == [3]
    assert page.locator("#pack-3 li:not([hidden])").count() == 1
    assert page.inner_text("#left") == "1 of the 9 packs on this page"
    page.keyboard.type("jk")
    assert page.evaluate("document.activeElement.id") == "text"
    # A link into a pack that is not shown brings all back.
    page.locator("table.packs a").last.click()
    page.wait_for_function("document.activeElement.closest('details.pack')?.id === 'pack-8'")
    assert shown() == [*range(9)]
    assert page.problems == []


def test_a_link_to_a_sequence_leads_to_it(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo)
    link = page.locator("#odd a[href*=sequence]").last
    name = link.get_attribute("href").removeprefix("#")
    link.click()
    page.wait_for_function("id => document.activeElement.id === id", arg=name)
    assert page.locator(f"#{name}").is_visible()
    assert 0 <= page.locator(f"#{name}").bounding_box()["y"] < 900
    page.keyboard.press("j")
    assert focused_pack(page) != name.split("-sequence")[0]
    assert page.problems == []


def test_the_address_of_a_pack_opens_it(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo)
    page.goto(demo.as_uri() + "#pack-7")
    page.wait_for_function("document.getElementById('pack-7').open")


def test_it_is_walked_through_by_keyboard(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("j")
    assert focused_pack(page) == "pack-0"
    for key, pack in (("j", "pack-1"), ("j", "pack-2"), ("k", "pack-1")):
        page.keyboard.press(key)
        assert focused_pack(page) == pack
        assert page.locator("details.pack[open]").count() == 1
    page.keyboard.press("Enter")
    assert page.locator("details.pack[open]").count() == 0
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    assert page.problems == []


def test_the_dark_is_dark_and_paper_is_white(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo, color_scheme="dark")

    def brightness(name: str) -> float:
        found = page.evaluate(f"getComputedStyle(document.body)['{name}'].match(/[0-9]+/g).slice(0, 3).map(Number)")
        return float(sum(found) / 3)

    assert brightness("backgroundColor") < 40
    assert brightness("color") > 200
    kept(page, "demo-dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert (brightness("backgroundColor"), brightness("color")) == (255, 0)
    assert not page.locator("nav").is_visible()
    assert page.locator("#pack-0 mark").first.is_visible()
    assert not page.locator("#pack-1").is_visible()
    assert page.pdf()[:5] == b"%PDF-"


def test_it_is_read_on_a_narrow_screen_and_without_scripts(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo, viewport={"width": 390, "height": 800}, java_script_enabled=False)
    page.locator("#pack-3 summary").click()
    assert page.locator("#pack-3 .text").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not page.locator(".choose").is_visible()
    kept(page, "demo-narrow")


def test_hostile_text_runs_nothing(chromium: Any, tmp_path: Path) -> None:
    write_hostile(tmp_path / "x")
    shard = Shard(tmp_path / "x")
    path = tmp_path / "x.html"
    path.write_bytes(make_page(shard, survey_shard(shard), decode_hostile))
    page = opened(chromium, path)
    page.evaluate("document.querySelectorAll('details').forEach(pack => { pack.open = true })")
    assert page.evaluate("window.hacked") is None
    assert HOSTILE[0] in page.inner_text("#pack-0")
    # Even a script that got in would not run: the page's policy names its own by its hash.
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_the_page_of_many_packs(chromium: Any, tmp_path: Path) -> None:
    packs: list[Sample] = [
        sample_of([5 + i % 40, 3 + i % 7], lambda p, i=i: int(p > i % 9), lambda p, i=i: 31 * i + p)
        for i in range(3000)
    ]
    with ShardWriter(tmp_path / "x", durable=False, capacity=64) as writer:
        for pack in packs:
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts)
    assert command("inspect", tmp_path / "x", "--html", tmp_path / "x.html").code == 0
    page = opened(chromium, tmp_path / "x.html")
    assert page.locator("table.packs tbody tr").count() == 48
    assert page.locator("table.packs tbody a").count() == 48
    assert page.problems == []
    kept(page, "many-packs")
