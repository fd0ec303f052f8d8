"""Find the start and end of an assistant's turn in a rendered conversation, from the text that a server would feed.

The model must learn to write exactly the text that it is not fed. Only the generation prompt defines that. For turn k,
a server feeds the rendering of ``messages[:k]`` with that prompt; after the turn, the conversation is
``messages[:k + 1]`` without it. So a turn starts at the end of the first rendering, and stops after the end of turn
that ends the second. Both renderings are made from the row itself, because prompts differ after a tool result, in a
first turn, and with other template variables.

In this module a *turn* is an assistant message. The text that the model writes for it is *its own*: words, tags and end
of turn. *Header* is the text before that, which the model is fed. Positions are characters of the rendered
conversation. ``Turn`` has the positions between which the edges, *start* and *stop*, are searched. Below is a turn of
Qwen 3. The model is fed the first line, and writes everything in the second up to ``stop``. Line feeds are shown as ␊::

    <|im_start|>assistant␊<think>␊␊</think>␊␊Twelve.<|im_end|>␊<|im_start|>user␊And 5 × 5?
    low                   start              first  said      high, stop

Most templates need only the first rule of each function. The other rules cannot be derived. Each names a public
template that needs it, and has a test case in ``tests/chat/test_chat_template_ways.py`` or in
``tests/template_grammar.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import nodes

from megatron_sft_idx.chat.template.messages import EMPTY_THINKING
from megatron_sft_idx.chat.template.style import ASKED, SAID
from megatron_sft_idx.chat.types import MaskOptions

_FAR = 256  # from this distance before their first difference on, renderings are compared token by token
_LOOKING = ("startswith", "endswith", "split", "rsplit", "partition", "find", "rfind", "count", "replace")
_ANSWERER = re.compile(r"assistant|model|bot|gpt", re.IGNORECASE)
TAG = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]")
_SPEAKER = re.compile(r"user|human|observation|tool|system|developer", re.IGNORECASE)
_NEAR = 32  # number of characters before a position that are used to find it again in another rendering


class Rules:
    """Facts about one template that hold for all conversations.

    Args:
        name: name of the template in errors.
        options: what is trained on.
        special: template variables such as ``bos_token``.
        controls: texts of control tokens.
        source: the template.
        tree: its syntax tree.

    Attributes:
        ends: texts that may end a turn: all control tokens except the beginning of a sequence, longest first.
        bos: the tokenizer's beginning-of-sequence text, or "" if that also ends sequences.
        eos: the tokenizer's end-of-sequence text, or "".
        piece: matches the smallest unit for comparing headers: a control token, a tag, a word, or any other character.
        prompted: whether the template can write a generation prompt on request.
        prompt_varies: whether the generation prompt may differ between rows (see ``prompt_varies``).
        keeps_all: whether all generated text is trained on.
        tested: matches the strings that the template searches for in its input, such as </think> and /no_think.
        loud: matches possible ends of a turn, and tags.
        spelt: all strings in the template's source.
    """

    def __init__(
        self,
        name: str,
        options: MaskOptions,
        special: Mapping[str, str],
        controls: Iterable[str],
        source: str,
        tree: nodes.Template,
    ) -> None:
        self.name, self.options = name, options
        bos, eos = (special.get(key) or "" for key in ("bos_token", "eos_token"))
        ends = {*controls, *(text for text in special.values() if isinstance(text, str))} - ({"", bos} - {eos})
        self.ends = tuple(sorted(ends, key=lambda text: (-len(text), text)))
        self.bos, self.eos = bos if bos != eos else "", eos
        tokens = "".join(f"{re.escape(text)}|" for text in self.ends)
        self.piece = re.compile(rf"{tokens}<[^<>\s]+>|\[[A-Z_/]+\]|\w+|.", re.DOTALL)
        self.prompted = "add_generation_prompt" in source
        self.prompt_varies = prompt_varies(tree)
        self.keeps_all = options.train_on_thinking and options.train_on_tool_calls
        looking = [one for one in tree.find_all(nodes.Call) if getattr(one.node, "attr", "") in _LOOKING]
        tests = [one for one in tree.find_all(nodes.Test) if one.name in ("eq", "equalto", "==", "in")]
        looked_for = {
            constant.value
            for node in [*tree.find_all(nodes.Compare), *looking, *tests]
            for constant in node.find_all(nodes.Const)
            if isinstance(constant.value, str) and constant.value.strip() and not constant.value.isidentifier()
        }
        self.tested = re.compile("|".join(map(re.escape, sorted(looked_for, key=len, reverse=True))) or "(?!)")
        self.loud = re.compile("|".join([*map(re.escape, self.ends), TAG.pattern]))
        self.spelt = frozenset(one.value for one in tree.find_all(nodes.Const) if isinstance(one.value, str))


class Turn(NamedTuple):
    """The known positions of a turn before its edges are found: its own words, and all text that may be its own.

    Attributes:
        message: position of the assistant message.
        low: start of the text that may belong to the turn.
        first: the first character that is certainly its own.
        said: the end of the last words that are certainly its own.
        high: the end of the text that was written for it, without trailing whitespace. If tracing cannot determine it,
            the start of the next message's words, or the end of the conversation.
    """

    message: int
    low: int
    first: int
    said: int
    high: int


class Written(NamedTuple):
    """Information from tracing about the text that was written for a turn.

    Attributes:
        stop: the end of that text, including trailing whitespace.
        head: the header of an answer to a question, or "". It is from the first answer to the turn's own question; if
            no question precedes the turn, from the first answer to a later question, or else from the first message.
        answered: whether the text after ``stop`` was written for another assistant message; None if no message wrote
            any.
    """

    stop: int
    head: str
    answered: bool | None


class EdgeFinder:
    """Finds the edges of turns in one rendered conversation by rendering beginnings of it, each of them once.

    Args:
        rules: the rules for every conversation.
        text: the whole conversation, rendered.
        messages: the conversation, as given to the template.
        render: renders other ``messages``, with or without ``add_generation_prompt``; returns None if the template
            rejects them.
    """

    def __init__(
        self, rules: Rules, text: str, messages: Sequence[dict[str, Any]], render: Callable[..., str | None]
    ) -> None:
        self._text, self._messages, self._render = text, messages, render
        self._prompted, self._ends, self._eos, self._piece = rules.prompted, rules.ends, rules.eos, rules.piece
        self._made: dict[tuple[int, str, bool], str | None] = {(len(messages), "", False): text}

    def _view(self, first: int, more: str = "", prompt: bool = False) -> str | None:
        """Return a rendering of a beginning of the conversation; None if the template rejects it.

        Args:
            first: number of messages from the conversation.
            more: an artificial question (``ASKED``) or answer (``SAID``) after them, or "".
            prompt: whether to request the generation prompt.
        """
        key = (first, more, prompt)
        if key not in self._made:
            added = [{"role": "user" if more == ASKED else "assistant", "content": more}] if more else []
            messages = [*self._messages[:first], *added]
            self._made[key] = self._render(messages=messages, add_generation_prompt=prompt)
        return self._made[key]

    def _with_and_without_prompt(self, first: int, more: str = "") -> tuple[str, str] | None:
        """Return the rendering of ``_view`` with and without generation prompt; None if either is rejected."""
        fed, closed = self._view(first, more, True), self._view(first, more)
        return None if fed is None or closed is None else (fed, closed)

    @cached_property
    def _made_up(self) -> tuple[str, str]:
        """Renderings of an artificial question, and of that with an answer; two "" if the template rejects either."""
        question, answer = {"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}
        asked = self._view(0, ASKED)
        answered = self._render(messages=[question, answer], add_generation_prompt=False)
        return (asked, answered) if asked is not None and answered is not None and SAID in answered else ("", "")

    def before_footer(self, said: int, stop: int) -> int:
        """Return the stop of a turn whose end of turn is followed by words: a model has stopped before these."""
        tail = self._text[said:stop]
        words = next((one for one in self._piece.finditer(tail) if one[0].replace("_", "").isalnum()), None)
        if words is None:
            return stop
        ends = [one.end() for one in self._piece.finditer(tail, 0, words.start()) if one[0] in self._ends]
        return said + ends[-1] if ends else stop

    def stop_behind_calls(self, turn: Turn, stop: int) -> int:
        """Return the stop of a turn that ends with calls, including the control token after them that stops a model.

        Gemma 4 writes <|tool_response> after the calls at the end of a conversation, so the model has to write it. If
        results follow, the same token begins their text.
        """
        closed = self.closed(turn.message)
        if closed is None or not closed.startswith(self._text[:stop]):
            return stop
        token = closed[stop:].strip()
        known = token in self._ends or TAG.fullmatch(token) is not None
        always = self._made_up[0].rstrip().endswith(token)  # a header that is written after all messages
        return stop + len(token) if token and known and not always and self._text.startswith(token, stop) else stop

    def ends_alike(self, turn: Turn, stop: int) -> bool:
        """Return whether a turn ends alike at the end of the conversation; True if that is not rendered."""
        closed = self.closed(turn.message)
        if closed is None or not closed.startswith(self._text[: turn.said]):
            return True
        tail, end = closed[turn.said :].strip(), self._text[turn.said : stop].strip()
        behind = tail[len(end) :].strip()  # text that the template writes after all messages, whatever the last role
        return tail.startswith(end) and (not behind or self._made_up[0].rstrip().endswith(behind))

    def fed(self, message: int) -> str | None:
        """Return the text that a server feeds before the turn at this position; None if the template rejects it."""
        return self._view(message, prompt=True)

    def closed(self, message: int) -> str | None:
        """Return the conversation up to and including a message; None if the template rejects it."""
        return self._view(message + 1)

    def start(self, turn: Turn, own: int | None, reasons: bool, thinks: bool, traced: bool) -> int:
        """Return the position at which the model starts to write a turn.

        Args:
            turn: the turn.
            own: start of the words at its ``first``, including a tag before them in the message itself; None if a call
                is first, because templates write tags before calls.
            reasons: whether these words may be reasoning, before which the template may write a tag.
            thinks: whether these words are reasoning. Then the model was not fed a prompt with an empty block of
                reasoning: it writes the block itself, including its opening tag.
            traced: whether all text from its ``low`` on is known to be written for the turn.
        """
        message, low, first, _, _ = turn
        head = self._text[low:first]
        fed = self._end_of_fed(turn)
        prompts = self._prompts(message)
        if thinks:
            prompts = [prompt if prompt in head else _without_block(prompt) for prompt in prompts]
        if any(prompts):
            if fed is not None and prompts[0]:
                return fed  # exact match: after Functionary's prompt, ...<|recipient|>, the model writes the rest
            # The model is fed other text for earlier turns; Qwen 3, for example, omits their reasoning. DeepSeek V3.1
            # writes no prompt after the result of a call, so only the prompt after an artificial question is known.
            for prompt in prompts:
                length = self._fed_by_prompt(prompt, head)
                if length:
                    return max(fed or 0, low + length)
            if message and fed is not None:
                return fed  # DeepSeek V3.1 is fed only the result of a call
        elif traced and message and own is not None and fed is not None and fed > low and self._text[fed:own].strip():
            # Command A writes a prompt without being asked; the text after it, <|START_RESPONSE|>, is the model's own.
            # But if the end of the question's turn is written with the answer and also ends answers, a header follows.
            behind = self._made_up[1].rpartition(SAID)[2].lstrip()
            if not behind.startswith(self._text[low:fed].strip()):
                return fed
        if own is not None and not reasons and not head[-1:].isspace():  # whitespace may be the beginning of the answer
            return own
        header = self._header_length(message, low, head)  # Magistral has no prompt; its [THINK] is the model's own
        if own is None or (header is not None and bool(head[header:].strip()) == reasons):
            return low + (header or 0)
        return own

    def stop_of_traced(self, turn: Turn, written: Written) -> int:
        """Return the end of a turn, including its end-of-turn token, if tracing shows which text was written for it.

        The end of turn can be after that text, if the template writes it with the next message.
        """
        said, high = turn.said, turn.high
        openings = self._openings(turn.message, written.head)
        shared, whole = self._shared_tail(turn, openings)
        if whole and shared < high and any(opening in self._text[shared:high] for opening in openings):
            return shared  # after calls, R1's distilled models write another header, for a content of ""
        if shared > high:
            return self._ending(high, shared)  # the end of turn is written with the next message, or after all messages
        if high > said and self._text.endswith(self._ends, said, high):
            return high
        return self._end_behind(turn.message, high, written.stop, openings, written.answered) or high

    def stop_of_untraced(self, turn: Turn) -> int:
        """Return the same as ``stop_of_traced`` if only the positions of the data's strings in the text are known."""
        message, _, _, said, high = turn
        text, last = self._text, self.closed(message) == self._text
        openings = self._openings(message, "")
        alone = last and not any(opening in text[said:high] for opening in openings)
        if alone and self._tail_elsewhere(turn) is None:
            return high  # nothing follows that could belong to another message
        shared, whole = self._shared_tail(turn, openings)
        if whole or text.endswith(self._ends, said, shared):
            return shared
        behind = shared + len(text[shared:high]) - len(text[shared:high].lstrip())
        return self._end_behind(message, behind, behind, openings, None) or shared

    def _shared_tail(self, turn: Turn, openings: Sequence[str]) -> tuple[int, bool]:
        """Compare the text after a turn's words with the text there if other messages follow.

        Their common beginning does not depend on the next message, so it is the turn's own, like ``<|im_end|>`` of Qwen
        3.

        Returns:
            The end of this common text, which starts at ``said`` and contains no header; and whether it is all that the
            template writes if no message follows.
        """
        text, said, tail = self._text, turn.said, self._tail_elsewhere(turn)
        if tail is None:
            return said, False
        last = self.closed(turn.message) == text
        if tail.strip():  # a template that trims captured text may write other whitespace after the words
            tail = text[said : len(text) - len(text[said:].lstrip())] + tail.lstrip()
        tail = tail if last else tail.rstrip()
        length = self._common(tail, text[said:])
        # A header is not an end of turn, even if a template writes one after all messages without being asked.
        headers = [at for opening in openings if (at := text.find(opening, said, said + length)) >= 0]
        shared = said + len(text[said : min(headers, default=said + length)].rstrip())
        return shared, not last and length == len(tail)

    def _tail_elsewhere(self, turn: Turn) -> str | None:
        """Return the text after a turn's last words if it is followed by something else than here.

        That is nothing or, if nothing follows here, an artificial question. None if the template rejects that, or if
        the turn is not found there, not even by its last characters (Mistral's templates write the tools elsewhere).
        """
        said, other = turn.said, self.closed(turn.message)
        if other == self._text:  # the turn is last, or the messages after it write nothing
            other = self._view(len(self._messages), ASKED)
        if other is None:
            return None
        if other.startswith(self._text[:said]):
            return other[said:]
        for far in (_NEAR, 8):
            near = self._text[max(turn.low, said - far) : said]
            if near.strip() and (at := other.rfind(near)) >= 0:
                return other[at + len(near) :]
        return None

    def _ending(self, start: int, stop: int) -> int:
        """Return the stop of the end of turn that begins at ``start``: at ``stop``, or before the first word.

        It also excludes a tag directly before a word, which may open the next header or (in Gemma 4) the result of a
        call, unless that tag is the end of sequence.
        """
        ends = [start]
        for piece in self._piece.finditer(self._text, start, stop + 1):
            if piece[0].replace("_", "").isalnum():
                whole = bool(self._eos) and self._text.endswith(self._eos, start, ends[-1])
                return ends[-2] if ends[-1] == piece.start() and len(ends) > 1 and not whole else ends[-1]
            if not piece[0].isspace() and piece.end() <= stop:
                ends.append(piece.end())
        return ends[-1]

    def always_prompts(self, turn: Turn) -> bool:
        """Return whether the template seems to write a header after all messages, even without a request for a prompt.

        Without tracing, such a header cannot be distinguished from an end of turn. It makes an artificial question, and
        the same with an answer, end alike, in words or in the tag directly before the answer.
        """
        if any(self._prompts(turn.message)) and self._tail_elsewhere(turn) is not None:
            return False  # headers are written on request, and `_tail_elsewhere` finds the end of turn
        asked, answered = self._made_up
        at = answered.rfind(SAID)
        if at < 0:
            return False
        length = _parting(asked[::-1], answered[: at + len(SAID) - 1 : -1])
        behind, before = answered[len(answered) - length :], answered[max(0, at - _NEAR) : at].rstrip()
        header = next((tag[0] for tag in TAG.finditer(before) if tag.end() == len(before)), None)
        return any(map(str.isalnum, TAG.sub(" ", behind))) or (header is not None and header in behind)

    def _openings(self, message: int, head: str) -> list[str]:
        """Return the beginnings of assistant headers, from prompts and a traced ``head``: ``<|im_start|>``, or a word.

        Such an opening separates an end of turn from the header after it, as in Command A.
        """
        found = [self._opening(prompt) for prompt in self._prompts(message) if prompt][:1]
        opening = self._opening(head)
        if _SPEAKER.search(opening):  # the end of another turn, or a default system message, comes before it
            tags = [tag[0] for tag in TAG.finditer(head) if _ANSWERER.search(tag[0])]
            if tags:
                head = opening = tags[0]
        closed = (self.closed(message) or "").rstrip()
        more = head.lstrip().removeprefix(opening)
        ends = opening == self._eos or (closed.endswith(opening) and not _ANSWERER.search(opening))
        if opening and more.strip() and ends:
            opening = self._opening(more)  # that was the end of a question's turn; it ends this turn too
        if opening:
            found.append(opening)
        return [opening for opening in found if opening != self._eos]

    def _opening(self, header: str) -> str:
        header = header.lstrip()
        tag = self._piece.match(header)
        if tag and len(tag[0]) > 1 and not tag[0].isalnum():
            return tag[0]
        return header.split(maxsplit=1)[0] if header else ""

    def _end_of_fed(self, turn: Turn) -> int | None:
        """Return the end of the text fed before a turn; None if the conversation does not begin with it."""
        fed = self._view(turn.message, prompt=True)
        begins = fed is not None and len(fed) <= turn.first and self._text.startswith(fed)
        return max(turn.low, len(fed)) if fed is not None and begins else None

    def _prompts(self, message: int) -> list[str]:
        """Return two generation prompts: for a turn at this position, and after an artificial question; or ""."""
        if not self._prompted:
            return [""]
        found = []
        for pair in (self._with_and_without_prompt(message), self._with_and_without_prompt(0, ASKED)):
            prompt = "" if pair is None else pair[0][self._common(*pair) :]
            found.append(prompt if prompt.strip() else "")
        return found

    def _fed_by_prompt(self, prompt: str, head: str) -> int:
        """Return how many characters of ``head``, the text before a turn's own, this prompt feeds to the model.

        They end at the last occurrence in ``head`` of the prompt, or of its last tags or words; 0 if neither occurs.
        """
        if not prompt:
            return 0
        at = head.rfind(prompt)
        if at >= 0:
            return at + len(prompt)
        ours, theirs = self._piece.findall(head), self._piece.findall(prompt.lstrip())
        # A prompt may have more text before the header, such as a system message: compare it from its last tag or its
        # last word on.
        strong = [i for i, piece in enumerate(theirs) if _is_tag(piece)]
        strong = strong or [i for i, piece in enumerate(theirs) if piece[0].isalnum()]
        end = theirs[strong[-1] :] if strong else theirs
        for at in range(len(ours) - len(end), -1, -1):
            if ours[at : at + len(end)] == end:
                return len("".join(ours[: at + len(end)]))
        # A prompt may end with a tag that this turn does not have, such as Nemotron's <think>.
        match = SequenceMatcher(None, ours[::-1], theirs[::-1], autojunk=False).find_longest_match()
        stop = len(ours) - match.a
        return len("".join(ours[:stop])) if any(map(_is_tag, ours[stop - match.size : stop])) else 0

    def _header_length(self, message: int, low: int, head: str) -> int | None:
        """Return how many characters of ``head`` also precede a plain answer in the turn's place; None if not found."""
        other = self._view(message, SAID)
        at = -1 if other is None else other.rfind(SAID)
        if other is None or at < 0:
            return None
        for far in (_NEAR, 8):
            near = self._text[max(0, low - far) : low]
            if (begin := other.rfind(near, 0, at) if near else 0) >= 0:
                return self._common(other[begin + len(near) : at], head)
        return None

    def _end_behind(
        self, message: int, high: int, at: int, openings: Sequence[str], answered: bool | None
    ) -> int | None:
        """Return the end of the control token at ``at`` if it ends the turn although no comparison shows it; or None.

        It may be a tag that names the next speaker, like GLM's <|user|> and <|observation|>: a model with such a
        template stops after writing that tag. A tag that begins assistant headers, or only opens a question, does not
        end a turn.

        Args:
            message: position of the turn's message.
            high: the end of all text that may be the turn's own.
            at: required start of the control token. Only an end of sequence may be elsewhere than at ``high``.
            openings: beginnings of assistant headers.
            answered: see ``Written``.
        """
        messages = self._messages
        if self._eos and self._text.startswith(self._eos, at):
            return at + len(self._eos)
        end = next((end for end in self._ends if self._text.startswith(end, at)), "")
        another = answered
        if another is None and message + 1 < len(messages) and messages[message + 1].get("role") == "assistant":
            another = not self._text[at + len(end) :].lstrip().startswith(tuple(openings))
        if another or not end or end in openings or at != high:
            return None
        alone = self._with_and_without_prompt(0, ASKED)
        if alone is not None and not _SPEAKER.search(end):
            before = alone[1].partition(ASKED)[0].strip()
            if before.startswith(end) or before.endswith(end):
                return None
        return at + len(end)

    def _common(self, one: str, other: str) -> int:
        """Return the length of the common beginning of two texts, in whole units of ``Rules.piece``."""
        length = max(0, _parting(one, other) - _FAR)  # far enough back for the units of both texts to be in step
        ours, theirs = self._piece.finditer(one, length), self._piece.finditer(other, length)
        for a, b in zip(ours, theirs, strict=False):
            if a[0] != b[0]:
                break
            length = a.end()
        return length


def _without_block(prompt: str) -> str:
    """Return a prompt without the empty block of reasoning at its end."""
    for at in range(len(prompt)):
        if (block := EMPTY_THINKING.match(prompt, at)) and block.end() == len(prompt):
            return prompt[: at + len(block[0]) - len(block[0].lstrip())]
    return prompt


def _is_tag(piece: str) -> bool:
    return len(piece) > 1 and not piece.replace("_", "").isalnum()


def _parting(one: str, other: str) -> int:
    """Return the position of the first difference between two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def prompt_varies(tree: nodes.Template) -> bool:
    """Return whether the generation prompt may differ between two rows with the same variables.

    It cannot if the statements that depend on the request read only variables that are given to the template and never
    set in it. A prompt that reads the messages, or values computed from them, may differ.
    """
    made = {"messages", "tools", "loop", "self", "caller", "varargs", "kwargs"}
    made |= {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    made |= {macro.name for macro in tree.find_all(nodes.Macro)}
    made -= {"add_generation_prompt"}  # many templates set a default for it
    asking = [
        node
        for node in tree.find_all((nodes.If, nodes.Output, nodes.Assign, nodes.CondExpr))
        if any(name.name == "add_generation_prompt" for name in node.find_all(nodes.Name))
    ]
    # For an outer statement, which also contains other code, only the tests count.
    read: list[nodes.Node] = []
    for node in asking:
        if not any(other is not node and _holds(node, other) for other in asking):
            read.append(node)
        elif isinstance(node, nodes.If):
            read += [node.test, *(one.test for one in node.elif_)]
    in_loop = any(_holds(loop, node) for loop in tree.find_all(nodes.For) for node in asking)
    return in_loop or any(name.name in made for node in read for name in node.find_all(nodes.Name))


def _holds(outer: nodes.Node, inner: nodes.Node) -> bool:
    return any(node is inner for node in outer.find_all(type(inner)))
