"""Every input of the fuzz corpus keeps the contract; tested without a fuzzer. And the targets can fail."""

from __future__ import annotations

import gzip

import pytest
from fuzz.contract import refused
from fuzz.targets import CORPUS, TARGETS, load
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sft_idx.errors import FormatError


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_keeps_the_contract(name: str) -> None:
    run = load(name)
    seeds = sorted((CORPUS / name).iterdir())
    assert len(seeds) >= 2
    run(b"")
    for seed in seeds:
        try:
            run(seed.read_bytes())
        except BaseException:
            print(seed)
            raise


PUNCTUATION = st.lists(st.sampled_from([b"[", b"]", b"{", b"}", b'"', b",", b"1"])).map(b"".join)


@given(st.binary(max_size=400))
@settings(max_examples=400, deadline=None)
def test_any_row_is_read_or_refused_with_a_reason(data: bytes) -> None:
    load("rows")(data)


@given(st.sampled_from([b"\0", b"\1", b"\2", b"\3", b"\4"]), st.binary(max_size=60) | PUNCTUATION, st.integers(0, 4))
@settings(max_examples=400, deadline=None)
def test_any_bytes_give_rows_or_named_errors(name: bytes, data: bytes, way: int) -> None:
    """The bytes are used unchanged, inside an array, as compressed data, and compressed."""
    made = (data, b"[" + data, b"\x1f\x8b" + data, b"\x28\xb5\x2f\xfd" + data, gzip.compress(data))
    load("input-file")(name + made[way])


def test_every_corpus_has_its_target() -> None:
    assert {path.stem for path in CORPUS.iterdir()} == set(TARGETS)


def test_the_contract_lets_nothing_else_pass() -> None:
    with pytest.raises(KeyError), refused():
        raise KeyError("x")
    with pytest.raises(AssertionError), refused("x: "):
        raise FormatError("something is wrong somewhere")
    with refused("x: "):
        raise FormatError("x: is no shard")
