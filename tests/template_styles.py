"""Chat templates in common styles, written for these tests, each with a simple oracle.

The oracle of a style returns the text that the model must learn for an assistant message. It uses only the message, and
whether it is the last one. It was written by reading the template, and does not render it.
"""

# ruff: noqa: E501 - templates and lists of tokens, as long as they are

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from megatron_sft_idx.chat.template import ChatTemplate, MaskOptions
from megatron_sft_idx.chat.types import Conversation, Rendered

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Style:
    """A template and its meaning.

    ``said(message, last)`` is the text that must be learnt. ``system``, ``calls`` and ``thinks`` are true if the
    template accepts these; ``trims`` if it strips contents.
    """

    source: str
    said: Callable[[Message, bool], str]
    system: bool = True
    calls: bool = False
    thinks: bool = False
    trims: bool = False


def content(message: Message) -> str:
    return str(message.get("content") or "")


def call_lines(message: Message) -> str:
    return "".join(
        '\n<call>{"name": "' + call["function"]["name"] + '", "arguments": '
        + json.dumps(call["function"]["arguments"], ensure_ascii=False) + "}</call>"
        for call in message.get("tool_calls") or ()
    )  # fmt: skip


CHATML = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Text between the braces, header tags, trimmed contents, and a beginning-of-text token only before the first message.
HEADERS = """{% set listed = messages %}{% for one in listed -%}
{% set shown = '<|head|>' + one['role'] + '<|/head|>\n\n' + one['content'] | trim + '<|eot|>' -%}
{% if loop.index0 == 0 %}{% set shown = bos_token + shown %}{% endif %}{{ shown -}}
{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""

# Another name for the assistant, strict alternation, no system message.
RENAMED = """{{ bos_token }}
{%- for message in messages -%}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('turns must alternate') }}
  {%- endif -%}
  {%- set who = 'model' if message['role'] == 'assistant' else message['role'] -%}
  {{ '<turn>' + who + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>model\n' }}{%- endif -%}"""

# No generation prompt: the closing tag of the question acts as the prompt. Answers end with eos.
BRACKETS = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}
{%- endif %}{% endfor %}"""

# The end of an answer is written by the next message, or after the loop.
LATE_END = """{{ bos_token }}{% set ns = namespace(open=false) %}
{%- for m in messages %}
{%- if ns.open %}{{ eos_token }}{% set ns.open = false %}{% endif %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- else %}{{ '<|Assistant|>' + m.content }}{% set ns.open = true %}
{%- endif %}
{%- endfor %}
{%- if ns.open %}{{ eos_token }}{% endif %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""

# Reasoning is kept only after the last question, which is found by a backward loop. The prompt has empty thinking.
THINKING = """
{%- set ns = namespace(searching=true, last=messages | length) %}
{%- for m in messages[::-1] %}
{%- if ns.searching and m.role == 'user' %}
{%- set ns.searching = false %}{%- set ns.last = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif %}
{{- m.content + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"""

# Reasoning, calls and answers are separate messages on channels; the last answer ends differently.
CHANNELS = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
  {%- if m.thinking and (loop.last or m.tool_calls) %}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
  {%- endif %}
  {%- if m.tool_calls %}
    {%- for c in m.tool_calls %}
      {{- '<|start|>assistant to=' + c.function.name + '<|message|>' + c.function.arguments | tojson + '<|call|>' }}
    {%- endfor %}
  {%- else %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
  {%- endif %}
{%- else %}
  {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# Tool schemas come first; consecutive results share one turn.
TOOLS = """
{%- if tools %}{{ '<|im_start|>tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
  {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
  {{- '\n<result>' + message.content + '</result>' }}
  {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
  {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
  {%- for call in message.tool_calls or [] %}
    {%- set call = call.function %}
    {{- '\n<call>{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}</call>' }}
  {%- endfor %}
  {{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# With generation markers: the newline after the end of turn is inside them, so it is learnt.
MARKED = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

BY_INDEX = """
{%- for i in range(messages | length) %}
{%- set m = messages[i] %}
{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

MACRO_A_MESSAGE = """
{%- macro show(m, closing) %}{{ '<|im_start|>' + m.role + '\n' + m.content + closing }}{% endmacro %}
{%- for m in messages %}
{{- show(m, '<|im_end|>\n') }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The whole loop runs in a macro inside a block, so its text is captured twice before it is written.
CAPTURED = """
{%- macro chat(listed) %}
{%- for m in listed %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- endmacro %}
{%- set shown %}{{ chat(messages) }}{% endset %}
{{- shown }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Jumps out of iterations after writing; skips system messages; writes the prompt in the loop.
JUMPS = """
{%- for m in messages %}
{%- if m.role == 'system' %}{% continue %}{% endif %}
{{- '<|' + m.role + '|>\n' }}
{%- if m.role == 'assistant' %}{{ m.content + eos_token + '\n' }}{% continue %}{% endif %}
{{- m.content + eos_token + '\n' }}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% break %}{% endif %}
{%- endfor %}"""

# Only the tag of the next turn ends a turn: the model stops at that tag.
NEXT_TAG = """[start]
{%- for m in messages %}
{{- '<|' + m.role + '|>\n' + m.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

PARTS = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def _thinking_said(message: Message, last: bool) -> str:
    thought = message.get("reasoning_content") or ""
    if not last:
        return content(message) + "<|im_end|>"
    # The prompt has an empty block. With reasoning, the model writes the block itself, including the opening tag.
    return ("<think>\n" + thought + "\n</think>\n\n" if thought else "") + content(message) + "<|im_end|>"


def _channels_said(message: Message, last: bool) -> str:
    header = "<|start|>assistant"
    thought, calls = message.get("reasoning_content"), message.get("tool_calls")
    text = f"{header}<|channel|>analysis<|message|>{thought}<|end|>" if thought and (last or calls) else ""
    if calls:
        for call in calls:
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            text += f"{header} to={call['function']['name']}<|message|>{arguments}<|call|>"
    else:
        text += f"{header}<|channel|>final<|message|>{content(message)}" + ("<|return|>" if last else "<|end|>")
    return text.removeprefix(header)


STYLES = {
    "chatml": Style(CHATML, lambda m, last: content(m) + "<|im_end|>"),
    "headers": Style(HEADERS, lambda m, last: content(m).strip() + "<|eot|>", trims=True),
    "renamed": Style(RENAMED, lambda m, last: content(m).strip() + "<end_of_turn>", system=False, trims=True),
    "brackets": Style(BRACKETS, lambda m, last: content(m) + "</s>", system=False),
    "late end": Style(LATE_END, lambda m, last: content(m) + "</s>"),
    "thinking": Style(THINKING, _thinking_said, thinks=True),
    "channels": Style(CHANNELS, _channels_said, calls=True, thinks=True),
    "tools": Style(TOOLS, lambda m, last: content(m) + call_lines(m) + "<|im_end|>", calls=True),
    "marked": Style(MARKED, lambda m, last: content(m) + "<|im_end|>\n"),
    "by index": Style(BY_INDEX, lambda m, last: content(m) + "<|end|>"),
    "macro a message": Style(MACRO_A_MESSAGE, lambda m, last: content(m) + "<|im_end|>"),
    "captured": Style(CAPTURED, lambda m, last: content(m) + "<|im_end|>"),
    "jumps": Style(JUMPS, lambda m, last: content(m) + "</s>"),
    "next tag": Style(NEXT_TAG, lambda m, last: content(m).rstrip() if last else content(m) + "<|user|>"),
    "parts": Style(PARTS, lambda m, last: content(m) + "<|im_end|>"),
}


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONTROLS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|head|>", "<|/head|>", "<|User|>", "<|Assistant|>",
    "<|user|>", "<|assistant|>", "<|end|>", "<|start|>", "<|return|>", "<|call|>", "<|message|>", "<|channel|>",
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


def make(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(
        source, special_tokens=SPECIAL, control_tokens=CONTROLS, options=MaskOptions(**options), name="t.jinja"
    )


def trained(rendered: Rendered) -> list[str]:
    return [rendered.text[span.start : span.stop] for span in rendered.spans]


def stock_text(style: Style, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    if style is STYLES["parts"]:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return str(render_jinja_template([messages], tools=tools, chat_template=style.source, **SPECIAL)[0][0])


def turns(style: Style, count: int) -> list[dict[str, Any]]:
    """Return a conversation of unique words that uses everything that the style accepts."""
    messages = [{"role": "system", "content": "sys0 rules0"}] if style.system else []
    for turn in range(1, count + 1):
        messages.append({"role": "user", "content": f"ask{turn} why{turn}?"})
        if style.calls:
            call = {"type": "function", "function": {"name": f"func{turn}", "arguments": {f"key{turn}": turn}}}
            calls = {"role": "assistant", "content": "", "tool_calls": [call]}
            messages += [calls, {"role": "tool", "content": f"out{turn}"}, {"role": "tool", "content": f"more{turn}"}]
        answer = {"role": "assistant", "content": f"answer{turn} is{turn}.\n  indented{turn}"}
        if style.thinks:
            answer["reasoning_content"] = f"because{turn} of{turn}"
        messages.append(answer)
    return messages


def talk(*messages: dict[str, Any], weights: list[float] | None = None, **more: Any) -> Conversation:
    return Conversation(list(messages), weights or [1.0] * len(messages), **more)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def learnt(source: str, conversation: Conversation, **options: Any) -> list[str]:
    return trained(make(source, **options).render(conversation))


# Two templates that tracing cannot follow.
ACCUMULATES = """{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out + m.role + m.content %}
{%- endfor %}{{ ns.out }}"""
MEASURES = """{% set out %}{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% endset %}{{ out }}{{ out | length }}"""
