"""The search of test_chat_template_search with twenty thousand cases."""

from __future__ import annotations

import pytest
from template_search import searched


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 9))
def test_twenty_thousand_cases(number: int) -> None:
    seen = searched(number, templates=250, chats_each=10)
    assert seen.total() >= 2500
    assert seen["handled"] > 0.8 * (seen["handled"] + seen["refused"])
