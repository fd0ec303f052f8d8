"""README and docs quote only numbers of the benchmark page, and the check finds other numbers."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "tools" / "bench"
sys.path.append(str(BENCH))

import board  # noqa: E402
import quotes  # noqa: E402
from plot import Dot, dots  # noqa: E402
from report import Bench, Headline, quantity, shown  # noqa: E402

PAGE = """\
# Results

## reading

| what | ours | beside | theirs | times better | least to most |
|---|---|---|---|---|---|
| a read | 3.2 µs | stock | 23 µs | 7.2 | 6.9 to 7.4 |

## writing

| what | ours | beside | theirs | times better | least to most |
|---|---|---|---|---|---|
| a write | 41 MB | stock | 9.9 MB | 0.24 | |
"""
BLOCK = """\
<!-- board: some -->
Reads take 3.2 µs, 7.2 times as fast as stock ([reading](RESULTS.md#reading)).
<!-- /board -->
"""


# ---- the texts of this repository ----


@pytest.mark.parametrize("place", board.quoting(), ids=lambda place: place.name)
def test_every_figure_quoted_is_in_a_row_of_its_bench(place: Path) -> None:
    assert not quotes.complaints(place.read_text(encoding="utf-8"), board.PAGE.read_text(encoding="utf-8"))


def test_blocks_and_page_are_what_the_results_give() -> None:
    found = board.results()
    rows = {(result.name, one.key): one for result in found for one in result.headlines}
    assert board.PAGE.read_text(encoding="utf-8") == board.page(found)
    seen = []
    for place in board.quoting():
        text = place.read_text(encoding="utf-8")
        way = os.path.relpath(board.PAGE, place.parent)
        assert quotes.rewritten(text, rows, way) == (text, []), f"{place.name}: run tools/bench/board.py --readme"
        seen += [name for name, _ in quotes.blocks(text)]
    assert sorted(seen) == sorted(path.stem for path in quotes.TEMPLATES.glob("*.md"))


def test_every_bench_is_on_the_board() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in BENCH.glob("*.py")}
    assert {name for name, text in texts.items() if "    run_bench(" in text} == {*board.BENCHES, "report"}
    assert [result.name for result in board.results()] == list(board.BENCHES)


@pytest.mark.parametrize(
    "place", [place for place in board.quoting() if "<!-- board:" in place.read_text()], ids=lambda place: place.name
)
def test_an_altered_figure_is_noticed_wherever_it_is_quoted(place: Path) -> None:
    text, page = place.read_text(encoding="utf-8"), board.PAGE.read_text(encoding="utf-8")
    for _, block in quotes.blocks(text):
        for figure, numbers, _ in quotes.figures(block):
            altered = text.replace(block, block.replace(figure, figure.replace(numbers[0], "98765.4")))
            assert any("98765.4" in complaint for complaint in quotes.complaints(altered, page)), figure


# ---- the check itself ----


def test_a_figure_of_a_row_is_taken() -> None:
    assert quotes.complaints(BLOCK, PAGE) == []


@pytest.mark.parametrize(
    ("figure", "other"),
    [
        ("3.2 µs", "3.1 µs"),
        ("3.2 µs", "3.2 ms"),
        ("3.2 µs", "41 MB"),  # in a row for another bench
        ("7.2 times", "17.2 times"),
        ("7.2 times", "7.0 to 7.2 times"),
        ("#reading", "#writing"),
    ],
)
def test_another_figure_is_not(figure: str, other: str) -> None:
    assert quotes.complaints(BLOCK.replace(figure, other), PAGE)


def test_a_figure_in_no_block_is_not_taken_unless_it_is_known() -> None:
    assert len(quotes.complaints("It is 7.2 times as fast.", PAGE)) == 1
    assert quotes.complaints("```text\nstep 1  1.3 s\n```\nand `--wait 3 s`.", PAGE) == []
    for phrase in quotes.HELD_ELSEWHERE:
        assert quotes.complaints(f"so {phrase} it is", PAGE) == []


@pytest.mark.parametrize(
    "claim",
    [
        "5x faster",
        "12× the rate",
        "a 3-fold gain",
        "a factor of 4",
        "twice as fast",
        "ten times the rate",
        "30ms",
        "40 packs/s",
        "9 per cent",
    ],
)
def test_a_comparison_in_other_words_is_a_figure_too(claim: str) -> None:
    assert len(quotes.complaints(f"It is {claim}.", PAGE)) == 1


def test_every_phrase_that_something_else_holds_is_there() -> None:
    texts = " ".join(" ".join(place.read_text(encoding="utf-8").split()) for place in board.quoting())
    assert [phrase for phrase in quotes.HELD_ELSEWHERE if phrase not in texts] == []
    for holder, words in quotes.HELD_ELSEWHERE.values():
        assert words in (board.ROOT / holder).read_text(encoding="utf-8"), holder


def test_a_block_without_its_row_stays_and_is_named() -> None:
    text = "<!-- board: remote -->\nas it was\n<!-- /board -->\n"
    made, missing = quotes.rewritten(text, {}, "RESULTS.md")
    assert made == text
    assert any("remote/swift20.ratio" in complaint for complaint in missing)


# ---- results of benches ----


def test_a_ratio_is_of_single_rounds_and_above_one_where_ours_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("report.RESULTS", tmp_path)
    bench = Bench("some", "Some")
    bench.headline("time", "a time", [1.0, 2.0, 4.0], "ms", peer="a peer", theirs=[2.0, 2.0, 16.0])
    bench.headline("rate", "a rate", [1.0, 2.0, 4.0], "MB/s", peer="a peer", theirs=[2.0, 2.0, 16.0], more=True)
    bench.table(("a", "b"), [(1, 2)])
    with pytest.raises(ValueError, match="two headlines"):
        bench.headline("rate", "again", [1.0], "ms")
    bench.write()
    time, rate = (Headline(**one) for one in json.loads((tmp_path / "some.json").read_text())["headlines"])
    assert (time.ours, time.theirs, time.ratio, time.low, time.high) == (2, 2, 2, 1, 4)
    assert (rate.ratio, rate.low, rate.high) == (0.5, 0.25, 1)
    text = (tmp_path / "some.md").read_text()
    assert "| a time | 2.0 ms | a peer | 2.0 ms | 2.0 | 1.0 to 4.0 |" in text
    assert "| 1 | 2 |" in text
    assert "| 1 | 2 |" in capsys.readouterr().out


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Bench("some", "Some").headline("x", "x", [1.0, 2.0], "ms", peer="a peer", theirs=[1.0])


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.0123, "0.012"), (0.995, "1.0"), (0.55, "0.55"), (7.24, "7.2"), (9.96, "10"), (5528.3, "5,528")],
)
def test_two_digits_count(value: float, words: str) -> None:
    assert shown(value) == words


def test_times_are_shown_in_the_unit_that_makes_them_short() -> None:
    assert [quantity(value, "µs") for value in (5.97, 51_098.0, 2.5e6)] == ["6.0 µs", "51 ms", "2.5 s"]


def test_a_bench_that_cannot_run_leaves_its_reason_and_no_stale_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts, results = tmp_path / "bench", tmp_path / "results"
    scripts.mkdir()
    results.mkdir()
    (scripts / "remote.py").write_text("import sys\nprint('no store here')\nsys.exit(77)\n")
    (scripts / "shard.py").write_text("raise SystemExit('broken')\n")
    for name in ("remote.md", "plot.svg"):
        (results / name).write_text("of an earlier run")
    (results / "remote.json").write_text(json.dumps({"plots": ["plot"]}))
    monkeypatch.setattr(board, "RESULTS", results)
    monkeypatch.setattr(board, "__file__", str(scripts / "board.py"))
    assert board.run_all(["remote", "shard"], full=False) == ["shard"]
    assert sorted(path.name for path in results.iterdir()) == ["board.json", "remote.json"]
    (remote,) = board.results()
    assert remote.headlines == []
    assert "Not run: no store here" in board.page([remote])


def test_plots_are_drawn_on_white_with_what_they_show() -> None:
    marks = [Dot("ours <1>", [1.0, 2.0], True), Dot("theirs", [300.0, 400.0, 500.0], False, "a note")]
    for svg in (dots("A title", "ms", marks, one=True), dots("A title", "ms", marks, log=False)):
        assert "; less is better" in svg
        assert svg.count("<circle") == 2  # one is in the key
        for words in ("A title", "ours &lt;1&gt;", "a note", ">400<", 'rx="6" fill="#ffffff"'):
            assert words in svg
    assert "; more is better" in dots("A title", "MB/s", marks, more=True)


@pytest.mark.parametrize("plot", sorted((BENCH / "results").glob("*.svg")), ids=lambda plot: plot.stem)
def test_a_plot_of_rates_says_that_more_is_better(plot: Path) -> None:
    text = plot.read_text(encoding="utf-8")
    if re.search(r">[^<]*(?:/s|a second)\b[^<]*is better", text):
        assert "more is better" in text


def test_the_short_table_has_what_is_flagged() -> None:
    one = Headline("a", "a read", 3.2, "µs", "stock", 23.0, 7.2, 6.9, 7.4, short=True)
    other = dataclasses.replace(one, key="b", what="a write", short=False)
    result = board.Result("reading", {"headlines": [dataclasses.asdict(each) for each in (one, other)]}, "")
    lines = board.short_table([result])
    assert "| a read | 3.2 µs | stock | 23 µs | 7.2 | 6.9 to 7.4 | [reading](#reading) |" in lines
    assert not any("a write" in line for line in lines)
