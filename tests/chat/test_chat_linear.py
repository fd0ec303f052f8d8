"""The cost of rendering a chat, in renderings and characters, is linear in the number of turns."""

from __future__ import annotations

from typing import Any

import pytest
from template_styles import STYLES, call

from megatron_sft_idx.chat.template import ChatTemplate
from megatron_sft_idx.chat.template.trace import TracedTemplate
from megatron_sft_idx.chat.types import Conversation, MaskOptions

VARYING = STYLES["chatml"].source.replace(
    "{%- if add_generation_prompt %}", "{%- if add_generation_prompt and messages[-1].role != 'system' %}"
)
TEMPLATES = {name: STYLES[name].source for name in ("chatml", "tools", "thinking", "channels", "marked", "captured")}


def turns(count: int, kind: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How many?"}]
    for number in range(count - 1):
        if kind == "chat":
            messages += [{"role": "assistant", "content": f"So many: {number}."}, {"role": "user", "content": "More?"}]
        else:
            calls = [call("count", {"from": number, "to": {"last": [f"number {number + 1}"]}})]
            messages += [{"role": "assistant", "content": "", "tool_calls": calls}]
            messages += [{"role": "tool", "content": f"{number} things"}]
    return [*messages, {"role": "assistant", "content": "These were all."}]


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Provide the lengths of all texts that templates render."""
    lengths: list[int] = []
    text = TracedTemplate._text

    def counted(self: TracedTemplate, *arguments: Any) -> str:
        made = text(self, *arguments)
        lengths.append(len(made))
        return made

    monkeypatch.setattr(TracedTemplate, "_text", counted)
    return lengths


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "chat") for name in (*TEMPLATES, "varying")), ("tools", "calls"), ("channels", "calls")]
)
def test_work_grows_with_the_turns_and_not_with_their_square(name: str, kind: str, rendered: list[int]) -> None:
    spent: dict[int, tuple[float, float]] = {}
    for count in (20, 80):
        template = ChatTemplate(TEMPLATES.get(name, VARYING), options=MaskOptions(earlier_reasoning="drop"))
        messages = turns(count, kind)
        rendered.clear()
        made = template.render(Conversation(messages, [1.0] * len(messages)))
        assert len(made.spans) >= count
        spent[count] = len(rendered) / count, sum(rendered) / len(made.text)
    assert spent[80][0] <= 1.25 * spent[20][0]
    assert spent[80][1] <= 1.25 * spent[20][1]
    assert spent[80][1] < 12
