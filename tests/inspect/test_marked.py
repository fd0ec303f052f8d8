"""The marked view of a pack, with real tokens of the demo's tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from megatron_sft_idx.inspect.text import GREEN, RESET, mark_pack, trained_tokens
from megatron_sft_idx.lines import shortened

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[2] / "tools/demo/tokenizer/tokenizer.json"))


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


def sequence(*pieces: tuple[str, float]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return ids and label-aligned mask of text pieces, each trained with its weight."""
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in pieces:
        ids += TOKENIZER.encode(text, add_special_tokens=False).ids
        weights += [weight] * (len(ids) - len(weights))
    return np.array(ids, np.int32), np.array([*weights[1:], 0], np.float32)


def body(shown: str) -> str:
    """Return the rendered text without the rules above sequences."""
    return "\n".join(line for line in shown.split("\n") if "── sequence" not in line)


def test_trained_tokens_undoes_the_label_alignment() -> None:
    assert trained_tokens(np.array([0, 1, 1, 0], np.uint8)).tolist() == [0, 0, 1, 1]
    assert trained_tokens(np.array([0], np.uint8)).tolist() == [0]


def test_brackets_hold_exactly_what_is_trained() -> None:
    ids, mask = sequence(
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0), ("Hello!<|im_end|>", 1), ("\n", 0)
    )
    shown = mark_pack(ids, mask, [0, len(ids)], decode)
    assert body(shown) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello!<|im_end|>]]"
    trained = int(mask.sum())
    assert shown.startswith(
        f"── sequence 0, positions 0 to {len(ids) - 1}, {trained} of {len(ids)} tokens trained ──\n"
    )


@pytest.mark.parametrize("text", ["🫖 ያ ꙮ", "e\u0301 สวัสดี", "👩\u200d👩\u200d👧", "𓀀𓀁"])
def test_characters_of_several_tokens_stay_whole(text: str) -> None:
    ids, mask = sequence(("say: ", 0), (text, 1), (" done", 0))
    assert len(ids) > len(text)  # otherwise no character would be split
    assert body(mark_pack(ids, mask, [0, len(ids)], decode)) == f"say: [[{text}]] done"


def test_sequences_are_apart_and_no_mark_crosses_them() -> None:
    first, first_mask = sequence(("a", 0), (" b", 1))
    second, second_mask = sequence((" c", 0), (" d", 1))
    ids, mask = np.concatenate([first, second]), np.concatenate([first_mask, second_mask])
    boundaries = np.array([0, len(first), len(ids)], np.int32)
    shown = mark_pack(ids, mask, boundaries, decode)
    assert body(shown) == "a[[ b]]\n c[[ d]]"
    assert "sequence 1, positions 2 to 3, 1 of 2 tokens trained" in shown


def test_weights_are_told_apart() -> None:
    ids, mask = sequence(("x", 0), (" half", 0.5), (" full", 1))
    assert body(mark_pack(ids, mask, [0, len(ids)], decode)) == "x[[ half]]x0.5[[ full]]"


def test_color_ends_at_every_line() -> None:
    ids, mask = sequence(("q", 0), ("one\ntwo", 1), ("!", 0))
    shown = mark_pack(ids, mask, [0, len(ids)], decode, color=True)
    assert body(shown) == f"q{GREEN}one{RESET}\n{GREEN}two{RESET}!"
    assert "[[" not in shown


def test_escape_codes_in_the_data_do_not_reach_the_terminal() -> None:
    ids, mask = sequence(("\x1b[2Jgone\x07", 0), ("\x9b31m\r\t", 1))
    assert body(mark_pack(ids, mask, [0, len(ids)], decode)) == "␛[2Jgone␇[[\ufffd31m␍\t]]"


@pytest.mark.parametrize("character", ["\u202e", "\u2066", "\u200f", "\u2028", "\u2029", "\ufeff"])
def test_what_would_reorder_or_break_lines_unseen_is_shown(character: str) -> None:
    ids, mask = sequence((f"a{character}b", 0))
    assert body(mark_pack(ids, mask, [0, len(ids)], decode)) == f"a<U+{ord(character):04X}>b"


def test_texts_of_metadata_are_short_and_on_one_line() -> None:
    assert shortened("a\n\x1b[2J", 20) == "a␊␛[2J"
    assert shortened("x" * 10**7, 5) == "xxxx…"


def test_a_pack_without_trained_tokens_has_no_marks() -> None:
    ids, mask = sequence(("nothing here", 0))
    assert body(mark_pack(ids, mask, [0, len(ids)], decode)) == "nothing here"
