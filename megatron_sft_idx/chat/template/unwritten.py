"""Find the messages that a template leaves out, for example because it has no branch for their role."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron_sft_idx.chat.template.stand_in import owned_word, spellings


def unwritten_messages(
    messages: Sequence[dict[str, Any]],
    text: str,
    render: Callable[[Sequence[dict[str, Any]]], str | None],
) -> list[int]:
    """Return the positions of the messages that the template leaves out completely, except assistant messages.

    Most rows need only a search for the contents in the text. If one is not there, the template may have changed it
    (escaped it, cut it off, or taken it apart). The conversation is then rendered with other words in such messages. If
    the text stays the same, the template leaves them out.

    Args:
        messages: a conversation, in the form given to the template.
        text: its rendering, or several renderings of its beginnings.
        render: renders messages; returns None if the template rejects them.
    """
    missing: list[int] = []
    at = 0
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            continue
        words = _words_of(message.get("content"))
        # Most templates write messages in their order, so that the search is short.
        found = text.find(words, at)
        if found >= 0:
            at = found + len(words)
        elif not any(spelt in text for spelt in spellings(words)):
            missing.append(index)
    if not missing or (whole := render(messages)) is None:
        return []
    left_out: list[int] = []
    # A template usually writes either all messages of a role or none.
    for role in {messages[index].get("role") for index in missing}:
        chosen = [index for index in missing if messages[index].get("role") == role]
        other = render(_reworded(messages, chosen))
        if other is not None and any(owned_word(index) in other for index in chosen):
            chosen = [index for index in chosen if owned_word(index) not in other]
            other = render(_reworded(messages, chosen)) if chosen else None
        left_out += chosen if other == whole else ()
    return sorted(left_out)


def _words_of(content: object) -> str:
    """Return the text of a content, of several the first one that is not blank; "" if there is none."""
    if type(content) is str:
        return content.strip()
    parts = content if isinstance(content, list) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return next((text.strip() for text in texts if isinstance(text, str) and not text.isspace() and text), "")


def _reworded(messages: Sequence[dict[str, Any]], chosen: Collection[int]) -> list[dict[str, Any]]:
    """Return the messages with another word for each text of the chosen ones."""
    return [
        {**message, "content": _replaced(message["content"], owned_word(index))} if index in chosen else message
        for index, message in enumerate(messages)
    ]


def _replaced(content: Any, word: str) -> Any:
    if isinstance(content, str):
        return word
    return [
        {**part, "text": word} if isinstance(part, Mapping) and isinstance(part.get("text"), str) else part
        for part in content
    ]
