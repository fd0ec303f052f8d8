"""Chat templates in the styles of the field, written for these tests, each with an obvious oracle.

The oracle of a style says what the model must learn of each assistant message, from the message alone and whether
it is the conversation's last. It is written by reading the template, not by running anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Style:
    """A template and what it means.

    ``said(message, last)`` is what must be learnt. ``system``, ``calls`` and ``thinks`` say what the template takes;
    ``trims`` that it strips contents.
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

# Text between the braces, header tags, trimmed contents, a beginning-of-text token before the first message only.
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

# No generation prompt at all: the question's closing tag is the prompt. Answers end with eos.
BRACKETS = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}
{%- endif %}{% endfor %}"""

# The end of an answer is written by whatever comes next: the next message, or the end of the loop.
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

# Reasoning is kept after the last question only, found by walking backwards first. The prompt holds empty thinking.
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

# Reasoning, calls and answers are messages of their own on channels; the last answer ends differently.
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

# Tool schemas first; consecutive results share one turn.
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

# Marked by its author: the newline after the end of turn is inside, so it is learnt.
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

# The whole loop runs in a macro and then in a block: its text is captured twice before it is written.
CAPTURED = """
{%- macro chat(listed) %}
{%- for m in listed %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- endmacro %}
{%- set shown %}{{ chat(messages) }}{% endset %}
{{- shown }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Jumps out of iterations, after writing; system messages are skipped over; the prompt is written in the loop.
JUMPS = """
{%- for m in messages %}
{%- if m.role == 'system' %}{% continue %}{% endif %}
{{- '<|' + m.role + '|>\n' }}
{%- if m.role == 'assistant' %}{{ m.content + eos_token + '\n' }}{% continue %}{% endif %}
{{- m.content + eos_token + '\n' }}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% break %}{% endif %}
{%- endfor %}"""

# Nothing ends a turn but the tag that starts the next one: that tag is where the model stops.
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
    return (thought + "\n</think>\n\n" if thought else "") + content(message) + "<|im_end|>"


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
