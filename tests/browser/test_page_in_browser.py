"""The inspector's page in Chromium: clicks, text, keyboard navigation, dark mode and print.

``make test-browser`` installs the requirements and writes screenshots to build/screenshots. In other runs, missing
packages skip these tests.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TOKENIZER, command, preprocess
from pages import HOSTILE, decode_hostile, write_hostile
from sample_packs import Sample, sample_of, write_samples
from tokenizers import Tokenizer

from megatron_sft_idx.inspect.page import make_page
from megatron_sft_idx.inspect.summary import survey_shard
from megatron_sft_idx.shard import Shard, ShardWriter

pytestmark = pytest.mark.browser

REQUIRED = os.environ.get("SFT_IDX_BROWSER") == "1"  # set by make test-browser: missing packages are then an error
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


PICTURED = """() => {
    const hide = (names) => document.querySelectorAll(names).forEach((one) => one.remove());
    hide("#distributions, #sources, #odd, #origin, #viewer > .note, details:not(#pack-10)");
    hide("table.packs tbody tr:nth-child(n + 9)");
    document.querySelectorAll("#pack-10 li").forEach((one, number) => number === 5 || one.remove());
    document.querySelector("#pack-10").open = true;
    document.body.style.padding = "1.5rem 2.5rem";
    document.querySelectorAll("section").forEach((one) => { one.style.marginTop = "2rem"; });
}"""


def opened(chromium: Any, path: Path, **options: Any) -> Any:
    """Open the page in a new context. Any error, and any request except for the page, fails the test."""
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
    assert share in page.locator("#pack-0 h3").first.inner_text()
    boxes = [
        page.locator(selector).first.bounding_box() for selector in ("table.packs path.t0", "#pack-0 path.t0", ".bar")
    ]
    assert all(box and box["width"] > 1 and box["height"] > 1 for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.problems == []
    kept(page, "demo-light")


def test_the_picture_of_the_readme(chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep docs/page.png as build/screenshots/page.png: the summary, some packs, and a chat with marked answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1787564100")
    assert preprocess(Path("data/chats")).code == 0
    assert command("inspect", "data/chats", "--tokenizer", TOKENIZER, "--html", "page.html").code == 0
    page = opened(chromium, tmp_path / "page.html", viewport={"width": 1200, "height": 900})
    # Leave out what is between: some packs, the charts and tables, and all sequences except one.
    page.evaluate(PICTURED)
    assert page.locator("li:visible mark").count() > 1
    box = page.locator("ol.sequences:visible").bounding_box()
    shot = page.screenshot(
        clip={"x": 0, "y": 0, "width": 1200, "height": box["y"] + box["height"] + 24}, full_page=True
    )
    assert len(shot) < 150_000
    if REQUIRED:
        (SHOTS / "page.png").write_bytes(shot)


def test_links_open_the_packs_they_lead_to(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo)
    link = page.locator("#odd a:not([href*=sequence])").first
    number = link.get_attribute("href").removeprefix("#")
    target = page.locator(f"#{number}")
    page.evaluate("document.querySelectorAll('details').forEach(pack => { pack.open = false })")
    for _ in range(2):  # the address does not change the second time
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
    page.select_option("#trained", "none")
    assert page.inner_text("#left") == "3 of the 9 packs on this page"
    page.fill("#text", "1")  # a whole id, not the 1 in 10, 11, ...
    assert page.inner_text("#hits") == "hit 1 of 3, in 3 packs"
    page.fill("#text", "3  4 5")
    assert shown() == [3, 6]
    assert page.locator("#pack-3 li:not([hidden])").count() == 1
    assert page.inner_text("#searched").startswith(
        "Searched: the token ids of 3 of 9 packs, those chosen under Trained. "
    )
    page.keyboard.type("jk")
    assert page.evaluate("document.activeElement.id") == "text"
    # A link into a hidden pack shows all packs again.
    page.locator("table.packs a").last.click()
    page.wait_for_function("document.activeElement.closest('details.pack')?.id === 'pack-8'")
    assert shown() == [*range(9)]
    assert page.problems == []


HITS = """() => [...CSS.highlights].map(([name, ranges]) => [name, [...ranges].map(String)])"""


def painted(page: Any) -> dict[str, list[str]]:
    """The texts that are painted as hits."""
    return dict(page.evaluate(HITS))


def test_a_search_opens_and_marks_hits(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo)
    shard = Shard(demo.parent / "chats")
    text = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    found = [
        (number, match)
        for number in range(len(shard))
        for ids, _ in shard.sequences(number)
        for match in re.findall("in french", text.decode(ids.tolist(), skip_special_tokens=False), re.IGNORECASE)
    ]
    page.locator("#pack-1 summary").click()
    before = page.locator("#pack-1 ol").inner_text()
    page.locator("#pack-1 summary").click()
    page.fill("#text", " in  FRENCH ")
    packs = sorted({number for number, _ in found})
    assert 1 < len(packs) < len(found)
    assert page.inner_text("#hits") == f"hit 1 of {len(found)}, in {len(packs)} packs"
    assert page.inner_text("#searched").startswith(f"Searched: the text of all {len(shard)} packs, and the names of")
    visible = page.locator("details.pack:visible")
    assert visible.evaluate_all("all => all.map((pack) => pack.id)") == [f"pack-{number}" for number in packs]
    assert visible.evaluate_all("all => all.every((pack) => pack.open)")
    marked = painted(page)
    assert marked["current-hit"] == [found[0][1]]
    assert sorted(marked["hit"]) == sorted(match for _, match in found[1:])

    place = """() => {
        const box = [...CSS.highlights.get("current-hit")][0].getBoundingClientRect();
        return [box.top, box.bottom];
    }"""
    for number in [*range(2, len(found) + 1), 1]:
        page.keyboard.press("Enter")
        assert page.inner_text("#hits").startswith(f"hit {number} of ")
        first, last = page.evaluate(place)
        # The search, which stays at the top, does not cover it.
        assert page.locator(".search").bounding_box()["y"] + page.locator(".search").bounding_box()["height"] <= first
        assert last <= 900
    page.keyboard.press("Shift+Enter")
    assert page.inner_text("#hits").startswith(f"hit {len(found)} of ")
    page.click("#previous")
    page.click("#next")
    assert page.inner_text("#hits").startswith(f"hit {len(found)} of ")

    # A text that is cut into tokens keeps its hits.
    hit = page.locator(f"#pack-{packs[-1]} li:not([hidden]) .text").last
    hit.hover()
    assert hit.locator("span").count() > 5
    assert painted(page)["current-hit"] == [found[-1][1]]
    kept(page, "search")

    page.fill("#text", "no such words")
    assert page.inner_text("#hits") == "no hits"
    assert page.is_disabled("#next")
    assert visible.count() == 0
    page.fill("#text", "")
    assert (page.inner_text("#hits"), page.is_visible("#searched")) == ("", False)
    assert page.locator("details.pack:visible").count() == len(shard)
    assert page.locator("details.pack[open]").count() == 1  # as before the search
    page.locator("#pack-1 summary").click()
    assert page.locator("#pack-1 ol").inner_text() == before
    assert painted(page) == {"hit": [], "current-hit": []}
    assert page.problems == []


def test_a_search_finds_input_lines_and_names_what_it_left_out(chromium: Any, tmp_path: Path) -> None:
    packs = [sample_of([2000], lambda p: 1, lambda p, i=i: 7 * i + p) for i in range(400)]
    write_samples(tmp_path / "it's", packs)
    shard = Shard(tmp_path / "it's")
    path = tmp_path / "x.html"
    path.write_bytes(make_page(shard, survey_shard(shard), lambda ids: "word " * len(ids), tokenizer="a b"))
    page = opened(chromium, path)
    page.fill("#text", "don't")
    said = page.inner_text("#searched")
    shown = page.locator("details.pack").count()
    assert 48 <= shown < 400
    assert said.startswith(f"Searched: the text of {shown} of 400 packs, ")
    assert " only in part. " in said
    words = shlex.split(page.inner_text("#searched code"))
    assert words[1:] == ["inspect", str(tmp_path / "it's"), "--tokenizer", os.path.abspath("a b"), "--find=don't"]
    page.fill("#text", "word")
    assert " of " in page.inner_text("#hits")
    assert page.problems == []


def test_a_search_finds_the_line_of_an_input_file(chromium: Any, demo: Path) -> None:
    page = opened(chromium, demo)
    page.fill("#text", "chats.jsonl:17")
    found = page.inner_text("#hits")
    assert found.startswith("hit 1 of ")
    assert set(painted(page)["hit"]) == {"chats.jsonl:17"}
    assert page.problems == []


@pytest.mark.parametrize("phone", [False, True])
def test_charts_name_the_value_of_a_bar(chromium: Any, demo: Path, phone: bool) -> None:
    options = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True} if phone else {}
    page = opened(chromium, demo, **options)
    figure = page.locator("figure").first
    bars = figure.locator(".bar")
    assert figure.locator("title").count() == 0  # else the browser would show it as well
    box = bars.nth(3).bounding_box()
    x, y = box["x"] + box["width"] / 2, figure.locator("svg").bounding_box()["y"] + 20  # above the bar
    page.evaluate("y => scrollTo(0, y - 300)", y)
    y -= page.evaluate("scrollY")
    page.touchscreen.tap(x, y) if phone else page.mouse.move(x, y)
    value = figure.locator(".value")
    assert re.fullmatch(r"[\d,]+ to [\d,]+ tokens: [\d,]+ sequences? \([\d.]+%\)", value.inner_text())
    assert bars.nth(3).evaluate("bar => bar.classList.contains('chosen')")
    if phone:
        return
    # By keyboard: all bars in order.
    page.mouse.move(5, 5)
    assert value.inner_text() == ""
    figure.locator("svg").focus()
    values = []
    for _ in range(bars.count()):
        page.keyboard.press("ArrowRight")
        values.append(value.inner_text())
    shard = Shard(demo.parent / "chats")
    assert len(set(values)) == len(values)
    counts = [int(re.search(r": ([\d,]+) seq", one)[1].replace(",", "")) for one in values]
    assert sum(counts) == shard.header.num_sequences
    page.keyboard.press("Home")
    assert value.inner_text() == values[0]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_table_of_contents_stays_in_view(chromium: Any, demo: Path, width: int) -> None:
    page = opened(chromium, demo, viewport={"width": width, "height": 844})
    links = page.locator("nav a")
    assert links.first.get_attribute("aria-current") == "true"
    for name in ("distributions", "viewer", "origin"):
        page.locator(f"nav a[href='#{name}']").click()
        page.wait_for_function("name => document.querySelector('nav [aria-current]').hash === '#' + name", arg=name)
        nav = page.locator("nav").bounding_box()
        assert 0 <= nav["y"] < 1
        assert nav["width"] <= width
        # The heading that the link leads to is below it, and the link itself is in view.
        assert page.locator(f"#{name} h2").bounding_box()["y"] >= nav["height"]
        link = page.locator("nav [aria-current]").bounding_box()
        assert 0 <= link["x"] <= width - link["width"]
        assert page.locator("nav [aria-current]").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.problems == []


def test_a_phone_gets_no_hints_about_keys(chromium: Any, demo: Path) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    for scheme in ("light", "dark"):
        page = opened(chromium, demo, color_scheme=scheme, **phone)
        assert not page.locator("kbd").first.is_visible()
        assert "point" not in page.inner_text("#viewer > .note >> nth=0")
        page.fill("#text", "the")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert min(page.locator(name).bounding_box()["height"] for name in ("#text", "#next", "#trained")) >= 44
        if REQUIRED:
            page.screenshot(path=SHOTS / f"phone-{scheme}.png")
    assert opened(chromium, demo).locator("kbd").first.is_visible()


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
    assert not page.locator(".choose, .search, .keys").filter(visible=True).count()
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
    # Even an injected script would not run: the page's policy allows only its own script, by hash.
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
