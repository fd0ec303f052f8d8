"""Every input of the fuzz corpus keeps the contract, without a fuzzer; and the targets can fail."""

from __future__ import annotations

import pytest
from fuzz.contract import refused
from fuzz.targets import CORPUS, TARGETS, load

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


def test_every_corpus_has_its_target() -> None:
    assert {path.stem for path in CORPUS.iterdir()} == set(TARGETS)


def test_the_contract_lets_nothing_else_pass() -> None:
    with pytest.raises(KeyError), refused():
        raise KeyError("x")
    with pytest.raises(AssertionError), refused("x: "):
        raise FormatError("something is wrong somewhere")
    with refused("x: "):
        raise FormatError("x: is no shard")
