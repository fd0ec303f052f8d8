"""Writes the bundled demo chats: ``python tools/demo/make_chats.py [FILE]``.

Every chat is computed from a table and a seeded generator, so what the assistant says is right and a second
run writes the same bytes. Together they hold what real chat data holds: several turns, system prompts,
functions with calls and results, reasoning, many scripts, code blocks, parts lists, and answers that must not
be learned.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Message = dict[str, Any]
Chat = dict[str, Any]

OUTPUT = Path(__file__).parent / "chats.jsonl"
# What the chats talk about, in the order of the file; of units, how many of the second one of the first is.
TABLES = json.loads(OUTPUT.with_name("tables.json").read_text(encoding="utf-8"))
CITIES, ELEMENTS, FACTS, GREETINGS, ODDITIES, PHRASES, SNIPPETS, UNITS, WORDS = TABLES.values()
SEED = 20
SKIES = ["clear", "cloudy", "light rain", "snow", "thunderstorms", "fog"]
ICONS = dict(zip(SKIES, ["☀️", "☁️", "🌧️", "❄️", "⛈️", "🌫️"], strict=True))
PERSONAS = [
    "You are a helpful assistant. Keep answers short.",
    "You are a patient teacher who shows the steps.",
    "You answer in at most three sentences.",
    "You are a friendly assistant. If something is unclear, say what you assumed.",
]


def user(content: str | list[Message]) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, thinking: str | None = None, **extra: Any) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = thinking
    return message | extra


def call(identity: str, name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": identity, "type": "function", "function": function}


def calls(*made: Message, content: str | None = None, thinking: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content, "tool_calls": list(made)}
    if thinking is not None:
        message["reasoning_content"] = thinking
    return message


def result(identity: str, **values: Any) -> Message:
    return {"role": "tool", "tool_call_id": identity, "content": json.dumps(values, ensure_ascii=False)}


def schema(name: str, description: str, **parameters: str) -> Message:
    """An OpenAI function schema; every parameter is required, its value here names its JSON type."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    body = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": body}}


WEATHER = schema("get_weather", "The weather in a city now.", city="string")
CONVERT = schema("convert", "Convert an amount between units.", amount="number", source="string", target="string")
ORDER = schema("find_order", "Look up an order by its number.", number="string")
REFUND = schema("refund", "Pay an order back.", number="string", cents="integer")


def arithmetic(r: Random) -> Chat:
    """A product split into tens and ones, then a question that builds on it."""
    a, b, c = r.randint(12, 99), r.randint(12, 99), r.randint(3, 60)
    tens, ones = b // 10 * 10, b % 10
    parts = f"{a} × {b} = {a} × {tens} + {a} × {ones} = {a * tens} + {a * ones} = {a * b}."
    ask = r.choice(["What is {} times {}?", "Can you work out {} × {}?", "{} * {} = ?", "Multiply {} by {}, please."])
    more = r.choice(["And if I add {}?", "Now take away {}.", "Now halve that and add {}."])
    if "add" in more and "halve" not in more:
        answer = f"{a * b} + {c} = {a * b + c}."
    elif "away" in more:
        answer = f"{a * b} − {c} = {a * b - c}."
    else:
        answer = f"{a * b} ÷ 2 = {a * b / 2:g}, and {a * b / 2:g} + {c} = {a * b / 2 + c:g}."
    messages = [
        user(ask.format(a, b)),
        assistant(f"{a} × {b} = **{a * b}**.", f"Split {b} into {tens} and {ones}. {parts}"),
        user(more.format(c)),
        assistant(answer, f"The last result was {a * b}. {answer}" if r.random() < 0.7 else None),
    ]
    return {"messages": messages[: 2 * r.randint(1, 2)]}


def word_problem(r: Random) -> Chat:
    """A small story with a price, a count and change."""
    count, cents, paid = r.randint(2, 9), r.randrange(35, 400, 5), r.choice([2000, 5000])
    thing = r.choice(["apples", "stamps", "notebooks", "tram tickets", "croissants", "light bulbs"])
    name = r.choice(["Noor", "Björn", "Amélie", "Tomás", "Yuki", "Zsófia", "Kwame"])
    total, change = count * cents / 100, (paid - count * cents) / 100
    question = f"{name} buys {count} {thing} at €{cents / 100:.2f} each, paying €{paid // 100}. How much change?"
    cost = f"Cost: {count} × {cents / 100:.2f} = {total:.2f}."
    thinking = f"{cost}\nChange: {paid / 100:.2f} − {total:.2f} = {change:.2f}."
    answer = f"{name} gets €{change:.2f} back: the {thing} cost €{total:.2f} in all."
    return {"messages": [user(question), assistant(answer, thinking)]}


def weather(r: Random) -> Chat:
    """One or two cities looked up with a function; two are asked for in one turn."""
    cities = r.sample(CITIES, r.randint(1, 2))
    messages = [user(f"What's the weather like in {' and in '.join(cities)}?")]
    ids = [f"call_{r.randrange(16**6):06x}" for _ in cities]
    found = [(city, r.choice(SKIES), r.randint(-12, 38)) for city in cities]
    plan = f"get_weather takes one city a call, so that makes {len(cities)}."
    messages.append(
        calls(*(call(i, "get_weather", city=city) for i, city in zip(ids, cities, strict=True)), thinking=plan)
    )
    messages += [result(i, sky=sky, celsius=t) for i, (_, sky, t) in zip(ids, found, strict=True)]
    lines = [f"{city}: {sky} {ICONS[sky]}, {t} °C" for city, sky, t in found]
    messages.append(assistant("\n".join(f"- {line}" for line in lines) if len(lines) > 1 else lines[0] + "."))
    if r.random() < 0.6:
        city, sky, t = found[0]
        wet = sky in ("light rain", "snow", "thunderstorms")
        advice = "Yes, take one." if wet else "No, it should stay dry."
        messages += [user(f"Do I need an umbrella in {city}?"), assistant(f"{advice} It is {t} °C with {sky} there.")]
    return {"messages": messages, "tools": [WEATHER]}


def conversion(r: Random) -> Chat:
    """A unit conversion, by head or by function."""
    source, target, factor = r.choice(UNITS)
    amount = r.choice([2, 3, 5, 7.5, 10, 12, 26.2, 40, 100, 250])
    value = f"{amount * factor:.2f}".rstrip("0").rstrip(".")
    question = user(r.choice(["How many {t} are {a} {s}?", "{a} {s} in {t}?"]).format(a=amount, s=source, t=target))
    sign = "=" if float(value) == amount * factor else "≈"
    answer = f"{amount:g} {source} {sign} {value} {target}."
    if r.random() < 0.5:
        thinking = f"From {source} to {target} means times {factor}: {amount:g} × {factor} {sign} {value}."
        return {"messages": [question, assistant(answer, thinking)]}
    asked = calls(
        call("call_1", "convert", amount=amount, source=source, target=target), content="Let me convert that."
    )
    found = result("call_1", value=float(value), unit=target)
    return {"messages": [question, asked, found, assistant(answer)], "tools": [CONVERT]}


def greeting(r: Random) -> Chat:
    """One phrase in several languages, a turn each."""
    index = r.randrange(len(PHRASES))
    first, *others = r.sample(sorted(GREETINGS), r.randint(2, 4))
    messages = [
        user(f'How do you say "{PHRASES[index]}" in {first}?'),
        assistant(f"In {first}: **{GREETINGS[first][index]}**"),
    ]
    for language in others:
        words = GREETINGS[language]
        messages += [user(f"And in {language}?"), assistant(f"In {language}: **{words[index]}**")]
    if r.random() < 0.4:
        known = ", ".join(f"{GREETINGS[one][index]} ({one})" for one in (first, *others))
        messages += [user("Put them all on one line 🙏"), assistant(known + " 🌍")]
    return {"messages": messages}


def fact(r: Random) -> Chat:
    """Short questions of general knowledge, one to three in a chat."""
    messages: list[Message] = []
    for question, answer in r.sample(FACTS, r.randint(1, 3)):
        messages += [user(question), assistant(answer)]
    return {"messages": messages}


def element(r: Random) -> Chat:
    """Questions about a chemical element, asked as a list of parts."""
    name, symbol, number = r.choice(ELEMENTS)
    parts = [{"type": "text", "text": f"Element: {name}.\n"}, {"type": "text", "text": "Symbol and atomic number?"}]
    answer: list[Message] = [{"type": "text", "text": f"{symbol}, number {number}."}]
    first = assistant(f"{symbol}, number {number}.") if r.random() < 0.5 else {"role": "assistant", "content": answer}
    messages = [user(parts), first]
    if r.random() < 0.5:
        messages += [user("How many protons is that?"), assistant(f"{number}: the atomic number counts the protons.")]
    return {"messages": messages}


def code(r: Random) -> Chat:
    """A snippet, and what it prints or why it works."""
    question, answer, more, why = r.choice(SNIPPETS)
    messages = [user(question), assistant(answer)]
    if r.random() < 0.6:
        messages += [user(more), assistant(why, "They ask about the code above. " + why.split(".")[0] + ".")]
    return {"messages": messages}


def sorting(r: Random) -> Chat:
    """Lists put in order, letters counted."""
    words = r.sample(WORDS, r.randint(4, 7))
    messages = [user(f"Sort these: {', '.join(words)}"), assistant(", ".join(sorted(words)))]
    if r.random() < 0.5:
        messages += [user("Longest first?"), assistant(", ".join(sorted(words, key=lambda w: (-len(w), w))))]
    word = r.choice(words)
    letter = r.choice(sorted(set(word)))
    spelled = "-".join(word)
    messages += [
        user(f'How many times does "{letter}" occur in "{word}"?'),
        assistant(str(word.count(letter)) + ".", f"Spell it: {spelled}. I count {word.count(letter)}."),
    ]
    return {"messages": messages}


def refund(r: Random) -> Chat:
    """A support chat: an order number that is wrong at first, then a refund over several calls."""
    number, cents = f"{r.choice('ABCDEF')}-{r.randint(10000, 99999)}", r.randint(500, 20000)
    wrong = number.replace("-", "")
    item = r.choice(["kettle", "desk lamp", "rain jacket", "teapot 🫖", "board game 🎲"])
    messages = [
        user(f"Hi, my {item} arrived broken. Order {wrong}. I'd like my money back."),
        calls(call("call_1", "find_order", number=wrong), thinking="First I look the order up."),
        result("call_1", error="no such order"),
        assistant(f"I cannot find order {wrong}. Order numbers look like X-12345; could you check it?"),
        user(f"Sorry! It is {number}."),
        calls(call("call_2", "find_order", number=number), content="Thank you, one moment."),
        result("call_2", number=number, item=item, paid_cents=cents, status="delivered"),
        calls(
            call("call_3", "refund", number=number, cents=cents),
            thinking=f"The order exists and cost {cents} cents. It arrived broken, so all of it goes back.",
        ),
        result("call_3", ok=True),
        assistant(f"Done: €{cents / 100:.2f} for the {item} is on its way back to you. Sorry for the trouble!"),
    ]
    system = "You work for a small shop. Look an order up before you pay it back."
    return {"messages": [{"role": "system", "content": system}, *messages], "tools": [ORDER, REFUND]}


def correction(r: Random) -> Chat:
    """A wrong answer that must not be learned (``train`` or ``weight``), and the right one."""
    a, b = r.randint(13, 89), r.randint(13, 89)
    slip = a + b + r.choice([-10, -1, 1, 10])
    unlearned: Message = r.choice([{"train": False}, {"weight": 0}])
    messages = [
        user(f"{a} + {b}?"),
        assistant(f"{slip}.", **unlearned),
        user("Are you sure? Please check."),
        assistant(f"You are right to ask: {a} + {b} = {a + b}, not {slip}."),
    ]
    return {"messages": messages}


FAMILIES: dict[Callable[[Random], Chat], int] = {
    arithmetic: 40,
    word_problem: 25,
    weather: 40,
    conversion: 35,
    greeting: 40,
    fact: 30,
    element: 20,
    code: 30,
    sorting: 20,
    refund: 10,
    correction: 16,
}


def make_chats(seed: int) -> list[Chat]:
    """About 300 chats in a seeded order; the texts that are hard on tokenizers come once each."""
    r = Random(seed)
    chats = [family(r) for family, count in FAMILIES.items() for _ in range(count)]
    chats += [{"messages": [user(question), assistant(answer)]} for question, answer in ODDITIES]
    for chat in chats:
        if chat["messages"][0]["role"] != "system" and r.random() < 0.4:
            chat["messages"].insert(0, {"role": "system", "content": r.choice(PERSONAS)})
    r.shuffle(chats)
    return chats


def main(arguments: list[str]) -> None:
    output = Path(arguments[0]) if arguments else OUTPUT
    lines = [json.dumps(chat, ensure_ascii=False) + "\n" for chat in make_chats(SEED)]
    output.write_bytes("".join(lines).encode())
    print(f"{output}: {len(lines)} chats")


if __name__ == "__main__":
    main(sys.argv[1:])
