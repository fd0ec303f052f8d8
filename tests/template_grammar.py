"""Generated chat templates that resemble public ones.

A ``Design`` is one choice per feature; ``source_of`` writes the template. The template's own words are ``hq``, a number
and ``x``, so they cannot be confused with words of the conversation.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from hypothesis import strategies as st

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ROLES = ("user", "assistant", "system", "tool")


@dataclass(frozen=True)
class Design:
    """A template as one choice per feature. The first of the ``CHOICES`` of a feature is the simplest."""

    tags: str
    names: str
    writes: str
    loop: str
    content: str
    system: str
    end: str
    prompt: str
    reasoning: str
    calls: str
    arguments: str
    results: str
    tools: str
    behind: str
    markers: str


CHOICES: dict[str, tuple[str, ...]] = {
    "tags": ("chatml", "header", "tag", "words", "brackets", "colon", "pairs", "fused", "bos each", "no header"),
    "names": ("literal", "from role", "from map"),
    "writes": ("concat", "outputs", "set", "block", "join", "macro", "raw", "filter"),
    "loop": (
        "plain",
        "index",
        "rest",
        "copies",
        "merged",
        "collected",
        "captured",
        "trimmed",
        "macro",
        "outside",
        "subs",
    ),
    "content": ("plain", "or", "trim", "strip", "defined", "not none", "parts", "in", "default", "only parts"),
    "system": ("inline", "default before", "default in loop", "hoisted", "into user", "into last user"),
    "end": ("branch", "late", "not last", "last differs", "before others", "absent", "with next", "between"),
    "prompt": ("header", "thinking", "system first", "in loop", "none", "close first", "unless assistant", "always"),
    "reasoning": ("none", "tags", "last only", "always", "split", "channel"),
    "calls": ("none", "tojson", "named", "pythonic", "items", "before content", "own turns"),
    "arguments": ("tojson", "either", "text"),
    "results": ("branch", "grouped", "looked up", "looked up by id", "with call", "as user"),
    "tools": ("none", "before", "into system", "with last user"),
    "behind": ("nothing", "nothing", "words"),
    "markers": ("none", "none", "none", "none", "whole", "without calls", "end apart"),
}

SHAPES = {  # text before the role's name, after it, at the end of an answer, at the end of any other turn
    "chatml": ("<|im_start|>", "\n", "<|im_end|>\n", "<|im_end|>\n"),
    "header": ("<|head|>", "<|/head|>\n\n", "<|eot|>", "<|eot|>"),
    "tag": ("<|", "|>\n", "</s>\n", "\n"),
    "words": ("### ", ":\n", "</s>\n\n", "\n\n"),
    "brackets": ("[", "] ", "</s>", " [/]"),
    "colon": ("", ": ", "</s>", "\n"),
    "pairs": ("<", ">", "</a>", "</u>"),
    "fused": ("<|start|>", "<|message|>", "<|end|>", "<|end|>"),
    "bos each": ("<s>[", "] ", "</s>", " [/]"),
    "no header": ("[", "] ", "</s>", " [/]"),
}


def designs() -> st.SearchStrategy[Design]:
    """Draw designs. Most are plain with a few odd features; some are odd in all features."""
    odd = {name: st.sampled_from(choices) for name, choices in CHOICES.items()}
    mostly = {
        name: st.one_of(st.just(choices[0]), st.sampled_from(choices))
        if name not in ("calls", "tools", "reasoning", "tags")
        else st.sampled_from(choices)
        for name, choices in CHOICES.items()
    }
    return st.one_of(st.builds(Design, **mostly), st.builds(Design, **odd)).map(_sensible)


def _sensible(design: Design) -> Design:
    """Remove combinations that no template has: ends of turn before headers, with a prompt or words before such an end.

    Also remove generation markers around statements that write nothing, in templates that collect their text.
    """
    if design.loop == "collected":
        design = replace(design, markers="none")
    if design.prompt == "always":  # only the role's name distinguishes such a header from an end of turn
        design = replace(design, names="from role")
    if design.end != "between":
        return design
    odd = design.prompt in ("in loop", "always", "close first")
    return replace(design, behind="nothing", prompt="header" if odd else design.prompt)


def name_of(design: Design, role: str) -> str:
    """Return the template's word for a role: a unique word, or the role's own name."""
    return role if design.names == "from role" else f"hq{ROLES.index(role) + 1}x"


def header_of(design: Design, role: str) -> str:
    """Return the text that the template writes before a message of this role."""
    before, after, _, _ = SHAPES[design.tags]
    return " " if design.tags == "no header" and role == "assistant" else before + name_of(design, role) + after


def controls_of(design: Design) -> list[str]:
    """Return the control tokens that a tokenizer for this template would have."""
    texts = {header_of(design, role).strip() for role in ROLES} if design.tags in ("tag", "pairs") else set()
    for text in SHAPES[design.tags]:
        if re.fullmatch(r"<[^<>]+>|\[[^\[\]]+\]", text.strip()):
            texts.add(text.strip())
    return sorted({*texts, "<|return|>", *SPECIAL.values()})


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


class Writing:
    """Writes one template's source."""

    def __init__(self, design: Design) -> None:
        self.design = design
        _, _, self.close, self.close_other = SHAPES[design.tags]
        if design.end == "between":
            self.close_other = ""

    def put(self, *expressions: str) -> str:
        """Return statements that write string expressions one after the other."""
        design, added = self.design, " + ".join(expressions)
        if design.loop == "collected":
            return "{%- set ns.out = ns.out + " + added + " -%}"
        outputs = "".join("{{- " + one + " -}}" for one in expressions)
        return {
            "concat": "{{- " + added + " -}}",
            "outputs": outputs,
            "set": "{%- set shown = " + added + " -%}{{- shown -}}",
            "block": "{%- set shown -%}" + outputs + "{%- endset -%}{{- shown -}}",
            "join": "{{- [" + ", ".join(expressions) + "] | join('') -}}",
            "macro": "{{- echo(" + added + ") -}}",
            "raw": "{{- '' }}" + "".join(map(_raw, expressions)) + "{{ '' -}}",
            "filter": "{%- filter replace('hq0x', '') -%}" + outputs + "{%- endfilter -%}",
        }[design.writes]

    def header(self, role: str) -> str:
        """Return an expression for the header of a message of this role."""
        if self.design.tags == "no header" and role == "assistant":
            return "' '"
        before, after, _, _ = SHAPES[self.design.tags]
        name = {"literal": _quoted(name_of(self.design, role)), "from map": f"names[{_quoted(role)}]"}.get(
            self.design.names, "m.role" if role != "tool" or self.design.results != "as user" else "'user'"
        )
        return _quoted(before) + " + " + name + " + " + _quoted(after)

    def fixed_header(self, role: str) -> str:
        return _quoted(header_of(self.design, role))

    def content(self) -> str:
        return {
            "plain": "m.content",
            "or": "(m.content or '')",
            "trim": "m.content | trim",
            "strip": "m.content.strip()",
            "defined": "(m.content if m.content is defined and m.content is not none else '')",
            "not none": "(m.content if m.content is not none else '')",
            "parts": "text_of(m.content)",
            "in": "('' if 'hq0x' in m.content else m.content)",
            "default": "(m.get('content', '') or '')",
            "only parts": "(m.content | map(attribute='text') | join(''))",
        }[self.design.content]

    def closing(self) -> str:
        """Return the end of an answer, in the answer's own iteration."""
        close, put = _quoted(self.close), self.put
        return {
            "branch": put(close),
            "late": "{%- set ns.open = true -%}",
            "with next": "",
            "not last": "{%- if not last -%}" + put(close) + "{%- endif -%}",
            "last differs": "{%- if last -%}" + put("'<|return|>'") + "{%- else -%}" + put(close) + "{%- endif -%}",
            "before others": "{%- if last or listed[i + 1].role != 'assistant' -%}" + put(close) + "{%- endif -%}",
            "absent": "",
            "between": "",
        }[self.design.end]

    def late_closing(self) -> str:
        """Return the end of an answer, written together with the text after it."""
        close = self.put(_quoted(self.close))
        if self.design.end == "late":
            return "{%- if ns.open -%}" + close + "{%- set ns.open = false -%}{%- endif -%}"
        if self.design.end == "between":
            return "{%- if i > 0 -%}" + close + "{%- endif -%}"
        if self.design.end == "with next":
            return "{%- if i > 0 and listed[i - 1].role == 'assistant' -%}" + close + "{%- endif -%}"
        return ""

    def system_text(self, text: str) -> str:
        return self.put(self.fixed_header("system"), text, _quoted(self.close_other))

    def definitions(self) -> str:
        shown = self.put(_quoted("\nhq7x: "), "tool | tojson", _quoted("\n"))
        return "{%- if tools -%}{%- for tool in tools -%}" + shown + "{%- endfor -%}{%- endif -%}"

    def user(self) -> str:
        before = after = ""
        if self.design.tools == "with last user":
            before += "{%- if i == ns.asked -%}" + self.definitions() + "{%- endif -%}"
        if self.design.system in ("into user", "into last user"):
            where = "not ns.told" if self.design.system == "into user" else "i == ns.asked"
            told = self.put("'<<'", "system", "'>>'")
            before += "{%- if system and " + where + " -%}{%- set ns.told = true -%}" + told + "{%- endif -%}"
        if self.design.prompt == "in loop":
            prompt = self.put(self.fixed_header("assistant"))
            after = "{%- if last and add_generation_prompt -%}" + prompt + "{%- endif -%}"
        close = _quoted(self.close_other)
        if not before:
            return self.put(self.header("user"), self.content(), close) + after
        return self.put(self.header("user")) + before + self.put(self.content(), close) + after

    def reasoned(self) -> str:
        """Return statements that write an answer with its reasoning."""
        put, content = self.put, self.content()
        thought = put("'<think>\\n'", "m.reasoning_content", "'\\n</think>\\n\\n'")
        if self.design.reasoning == "split":
            return (
                "{%- set said = " + content + " -%}{%- if '</think>' in said -%}"
                + put("'<think>'", "said.split('</think>')[0].split('<think>')[-1]", "'</think>'")
                + "{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}" + put("said")
            )  # fmt: skip
        when = {
            "tags": "m.reasoning_content",
            "always": "m.reasoning_content",
            "channel": "m.reasoning_content",
            "last only": "m.reasoning_content and i > ns.asked",
        }.get(self.design.reasoning)
        if when is None:
            return put(content)
        if self.design.reasoning == "channel":
            thought = put("'<|channel|>analysis<|sep|>'", "m.reasoning_content", "'<|next|><|channel|>final<|sep|>'")
        other = "{%- else -%}" + put("'<think></think>'") if self.design.reasoning == "always" else ""
        return "{%- if " + when + " -%}" + thought + other + "{%- endif -%}" + put(content)

    def called(self) -> str:
        """Return statements that write an answer's calls."""
        arguments = {
            "tojson": "f.arguments | tojson",
            "either": "(f.arguments if f.arguments is string else f.arguments | tojson)",
            "text": "f.arguments",
        }[self.design.arguments]
        each = "{%- for key, value in f.arguments.items() -%}"
        in_json = self.put('\'<call>{"name": "\'', "f.name", '\'", "arguments": \'', arguments, "'}</call>'")
        in_python = self.put("key", "'='", "value | string", "', '")
        in_tags = self.put("'<arg>' + key", "'</arg>'", "value | tojson", "'\\n'")
        one = {
            "tojson": self.put("'<call>'", "f | tojson", "'</call>\\n'"),
            "pythonic": self.put("'[' + f.name + '('") + each + in_python + "{%- endfor -%}" + self.put("')]'"),
            "items": self.put("'<call>' + f.name") + each + in_tags + "{%- endfor -%}" + self.put("'</call>'"),
        }.get(self.design.calls, in_json)
        if self.design.calls == "own turns":
            one = self.put("'<|to|>'") + one + self.put("'<|called|>'")
        if self.design.calls == "none":
            return ""
        loop = "{%- for call in m.tool_calls -%}{%- set f = call.function -%}" + one + "{%- endfor -%}"
        return "{%- if m.tool_calls -%}" + loop + "{%- endif -%}"

    def assistant(self) -> str:
        design = self.design
        said, calls, closing = self.reasoned(), self.called(), self.closing()
        if design.markers == "whole":
            body = "{%- generation -%}" + said + calls + closing + "{%- endgeneration -%}"
        elif design.markers == "without calls":
            body = "{%- generation -%}" + said + "{%- endgeneration -%}" + calls + closing
        elif design.markers == "end apart":
            body = "{%- generation -%}" + said + calls + "{%- endgeneration -%}"
            body += "{%- generation -%}" + closing + "{%- endgeneration -%}" if closing else ""
        elif design.calls == "before content":
            body = calls + said + closing
        else:
            body = said + calls + closing
        if design.results == "with call":
            result = self.put("'<result>'", "r.content", "'</result>'")
            body += "{%- if m.tool_calls -%}{%- for r in listed[i + 1:] -%}{%- if r.role != 'tool' -%}{%- break -%}"
            body += "{%- endif -%}" + result + "{%- endfor -%}{%- endif -%}"
        return self.put(self.header("assistant")) + body

    def tool(self) -> str:
        put, header, close = self.put, self.header("tool"), _quoted(self.close_other)
        name = "{%- for e in listed -%}{%- if e.role == 'assistant' and e.tool_calls -%}{%- for c in e.tool_calls -%}"
        ends = "{%- endfor -%}{%- endif -%}{%- endfor -%}"
        shown = put(header, "ns.called", "' '", self.content(), close)
        return {
            "branch": put(header, self.content(), close),
            "as user": put(header, "'<result>'", self.content(), "'</result>'", close),
            "with call": "",
            "grouped": "{%- if i == 0 or listed[i - 1].role != 'tool' -%}" + put(header) + "{%- endif -%}"
            + put("'<result>'", self.content(), "'</result>'")
            + "{%- if last or listed[i + 1].role != 'tool' -%}" + put(close) + "{%- endif -%}",
            "looked up": name + "{%- set ns.called = c.function.name -%}" + ends + shown,
            "looked up by id": put(header) + name + "{%- if c.id == m.tool_call_id -%}" + put("c.function.name", "': '")
            + "{%- endif -%}" + ends + put(self.content(), close),
        }[self.design.results]  # fmt: skip

    def message(self) -> str:
        """Return statements that write the message ``m``, which is number ``i`` of ``listed``."""
        design, start = self.design, self.late_closing()
        if design.system == "default in loop":
            start += "{%- if i == 0 and m.role != 'system' -%}" + self.system_text("'hq8x hq9x'") + "{%- endif -%}"
        system = self.put(self.header("system"), self.content(), _quoted(self.close_other))
        if design.system in ("hoisted", "into user", "into last user"):
            system = ""
        return (
            start + "{%- if m.role == 'system' -%}" + system + "{%- elif m.role == 'user' -%}" + self.user()
            + "{%- elif m.role == 'assistant' -%}" + self.assistant()
            + "{%- elif m.role == 'tool' -%}" + self.tool() + "{%- endif -%}"
        )  # fmt: skip

    def looped(self) -> str:
        message = self.message()
        copies = "{%- set ns.listed = ns.listed + [{}] -%}"
        one = "{'role': m.role, 'content': m.content, 'tool_calls': m.tool_calls, 'reasoning_content': "
        one += "m.reasoning_content, 'tool_call_id': m.tool_call_id}"
        listing, last = "{%- set listed = messages -%}", "{%- set last = loop.last -%}"
        known = "{%- set i = loop.index0 -%}" + last
        plain = "{%- for m in listed -%}" + known + message + "{%- endfor -%}"
        if self.design.loop == "index":
            begin = "{%- for i in range(listed | length) -%}{%- set m = listed[i] -%}"
            plain = begin + last + message + "{%- endfor -%}"
        elif self.design.loop == "rest":
            listing += "{%- if messages[0].role == 'system' -%}{%- set listed = messages[1:] -%}"
            listing += self.system_text("messages[0].content") + "{%- endif -%}"
        elif self.design.loop == "copies":
            copy = copies.replace("{}", one)
            listing = "{%- for m in messages -%}" + copy + "{%- endfor -%}{%- set listed = ns.listed -%}"
        elif self.design.loop == "merged":
            joined = one.replace("'content': m.content", "'content': ns.listed[-1].content + '\\n' + m.content")
            both = "{%- if ns.listed and m.role == 'user' and ns.listed[-1].role == 'user' -%}"
            both += "{%- set ns.listed = ns.listed[:-1] + [" + joined + "] -%}{%- else -%}"
            copy = both + copies.replace("{}", "m") + "{%- endif -%}"
            listing = "{%- for m in messages -%}" + copy + "{%- endfor -%}{%- set listed = ns.listed -%}"
        elif self.design.loop == "outside":
            begin = "{%- for m in listed[:-1] -%}{%- set i = loop.index0 -%}{%- set last = false -%}"
            after = "{%- set m = listed[-1] -%}{%- set i = listed | length - 1 -%}{%- set last = true -%}"
            plain = begin + message + "{%- endfor -%}" + after + message
        elif self.design.loop == "subs":
            begin = "{%- for i in range(listed | length) if listed[i].role -%}"
            plain = begin + last + re.sub(r"\bm\.", "listed[i].", message) + "{%- endfor -%}"
        elif self.design.loop in ("captured", "trimmed"):
            shown = "{{- all -}}" if self.design.loop == "captured" else "{{- all | trim -}}"
            plain = "{%- set all -%}" + plain + "{%- endset -%}" + shown
        elif self.design.loop == "macro":
            plain = "{%- macro chat(listed, system) -%}" + plain + "{%- endmacro -%}{{- chat(listed, system) -}}"
        return listing + plain

    def prompt(self) -> str:
        header = self.fixed_header("assistant")
        asked = "add_generation_prompt"
        if self.design.prompt == "unless assistant":
            asked += " and messages[-1].role != 'assistant'"
        prompt = {
            "header": self.put(header),
            "unless assistant": self.put(header),
            "always": self.put(header),
            "thinking": self.put(header, "'<think>\\n'"),
            "system first": self.system_text("'hq10x hq11x'") + self.put(header),
            "close first": self.put("'\\n'", header),
            "in loop": "",
            "none": "",
        }[self.design.prompt]
        # An end of turn before headers and a header after all messages look the same; no known template has both.
        if self.design.prompt == "always" and self.design.end not in ("between", "with next", "late"):
            return prompt
        return "{%- if " + asked + " -%}" + prompt + "{%- endif -%}" if prompt else ""

    def behind(self) -> str:
        """Return the text after all messages."""
        late = self.late_closing() if self.design.end == "late" else ""
        if self.design.end == "between":
            late = self.put(_quoted(self.close))
        return late + (self.put("'\\nhq12x hq13x\\n'") if self.design.behind == "words" else "")


def _raw(expression: str) -> str:
    literal = re.fullmatch(r"'((?:[^'\\]|\\.)*)'", expression)
    if literal is None:
        return "{{ " + expression + " }}"
    text = literal[1].replace("\\n", "\n").replace("\\'", "'").replace("\\\\", "\\")
    return "{{ '' }}" + text if text[:1] != "\n" else "{{ " + expression + " }}"


def source_of(design: Design) -> str:
    """Return the template of a design."""
    writing = Writing(design)
    source = "{%- set ns = namespace(out='', open=false, asked=-1, told=false, called='', listed=[]) -%}"
    if design.names == "from map":
        source += "{%- set names = " + json.dumps({role: name_of(design, role) for role in ROLES}) + " -%}"
    if design.writes == "macro":
        source += "{%- macro echo(text) -%}{{- text -}}{%- endmacro -%}"
    if design.content == "parts":
        source += "{%- macro text_of(content) -%}{%- if content is string -%}{{- content -}}{%- elif content -%}"
        source += "{%- for part in content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    if design.reasoning == "last only" or design.tools == "with last user" or design.system == "into last user":
        source += "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}"
        source += "{%- endfor -%}"
    source += "{%- set system = '' -%}" + writing.put("bos_token")
    if design.system in ("hoisted", "into user", "into last user"):
        source += "{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content -%}{%- endif -%}"
    if design.system == "hoisted":
        source += "{%- if system -%}" + writing.system_text("system") + "{%- endif -%}"
    if design.system == "default before":
        default = writing.system_text("'hq8x hq9x'")
        source += "{%- if messages[0].role != 'system' -%}" + default + "{%- endif -%}"
    if design.tools in ("before", "into system"):
        source += writing.definitions()
    source += writing.looped() + writing.behind() + writing.prompt()
    return source + "{{- ns.out -}}" if design.loop == "collected" else source
