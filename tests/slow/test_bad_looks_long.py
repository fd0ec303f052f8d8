"""Documents of a catalog that are torn at any byte, for all readers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import test_bad_looks as producers
import test_bad_looks_live as consumers
from bad_looks import reports_lasting_faults, survives_bad_looks

from megatron_sft_idx.live import Catalog

pytestmark = pytest.mark.slow
catalog, folder = producers.catalog, consumers.folder


@pytest.mark.parametrize("what", producers.LOOKS)
def test_any_byte_for_producers(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    look = producers.LOOKS[what](catalog)
    survives_bad_looks(look, monkeypatch, most=sys.maxsize)
    if look.is_document:
        reports_lasting_faults(look, monkeypatch, most=sys.maxsize)


@pytest.mark.parametrize("what", consumers.LOOKS)
def test_any_byte_for_consumers(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    look = consumers.look(folder, what)
    survives_bad_looks(look, monkeypatch, most=sys.maxsize)
    if look.is_document:
        reports_lasting_faults(look, monkeypatch, most=sys.maxsize)
