"""Rows with other names for fields and roles: the mapped row equals the plain one, and mistakes are reported."""

import json
import random
import re

import pytest
from chats import TOKENIZER, command, files_of, preprocess

from megatron_sft_idx.chat.row_mapping import ROW_TARGETS, TURN_TARGETS, RowMapping
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.tokenize.encoding import read_row
from megatron_sft_idx.tokenize.selection import row_hash

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]


def chat(rng, begin=()):
    turns = [*begin]
    for n in range(rng.randint(1, 3)):
        turns.append({"role": "user", "content": f"Question {n} {rng.random()}?"})
        if rng.random() < 0.3:
            turns += [
                {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {"n": n}}]},
                {"role": "tool", "content": "seen", "name": "look", "tool_call_id": "1"},
            ]
        answer = {"role": "assistant", "content": f"Answer {rng.random()}."}
        if rng.random() < 0.3:
            answer["reasoning_content"] = f"Thought {rng.random()}."
        if rng.random() < 0.2:
            answer[rng.choice(["weight", "train"])] = 1
        turns.append(answer)
    return turns


def plain_row(kind, rng):
    """Return a row with the known names, and the options that its kind needs."""
    more = {}
    if rng.random() < 0.5:
        more["system"] = f"Be {rng.random()}."
    if rng.random() < 0.5:
        more["tools"] = rng.choice([TOOLS, json.dumps(TOOLS)])
    if kind == "messages":
        return {"messages": chat(rng), **more}, {}
    if kind == "prompt":
        reasoning = {"reasoning_content": "Because."} if rng.random() < 0.5 else {}
        return {"prompt": f"Q {rng.random()}", "completion": f"A {rng.random()}", **reasoning, **more}, {}
    if kind == "lists":
        return {"prompt": chat(rng)[:1], "completion": chat(rng)[-1:], **more}, {}
    if kind == "kto":
        return {"messages": chat(rng), "label": rng.random() < 0.5, **more}, {"kind": "kto"}
    if kind == "preference":
        asked = chat(rng)[:1]
        answers = [[*asked, {"role": "assistant", "content": word}] for word in ("good", "bad")]
        return {"chosen": answers[0], "rejected": answers[1], **more}, {"kind": "preference"}
    if kind == "text":
        return {"text": f"Words {rng.random()}."}, {"train_on": "all"}
    return {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}, {}


KINDS = ("messages", "prompt", "lists", "kto", "preference", "text", "tokenized")


def put(row, path, value, rng):
    """Put a value at a path into a row, in objects, lists, or JSON text of such."""
    head, _, rest = path.partition(".")
    if not rest:
        row[head] = value
    elif rest.startswith("1."):
        row[head] = ["first", {}]
        put(row[head][1], rest[2:], value, rng)
    elif rng.random() < 0.3:
        inner = {}
        put(inner, rest, value, rng)
        row[head] = json.dumps(inner)
    else:
        row[head] = {"noise": 1}
        put(row[head], rest, value, rng)


def moved(row, targets, option_of, rng):
    """Return the row with some fields moved to random paths among other fields, and the mapping that finds them."""
    mapping = {}
    for n, target in enumerate(name for name in row if name in targets):
        form = rng.choice(["f{}", "data{}.inner", "data{}.1.text", "a{}.b.c"])
        mapping[target] = form.format(n)
    out = {"id": rng.random(), **{name: value for name, value in row.items() if name not in mapping}}
    for target, path in mapping.items():
        put(out, path, row[target], rng)
    if option_of == "row" and mapping.keys() & {"messages", "prompt", "text", "chosen", "input_ids"}:
        # Other content of the row is not read.
        out |= rng.choice([{}, {"conversations": [{"from": "human", "value": "other"}], "output": "other"}])
    return out, mapping


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapped_row_is_the_plain_one(kind):
    rng = random.Random(kind)
    for _ in range(150):
        row, options = plain_row(kind, rng)
        roles = {"user": "Alice 1", "assistant": "bob", "tool": "result"} if rng.random() < 0.5 else {}
        turn_names = {}
        if rng.random() < 0.6:
            turn_names = {name: f"{name}_{rng.random()}".replace(".", "") for name in TURN_TARGETS}
            if rng.random() < 0.5:
                turn_names["content"] = "body.words"

        def renamed(turn, roles=roles, names=turn_names):
            turn = turn | {"role": roles.get(turn["role"], turn["role"])}
            out = {"id": 7} if names else {}
            for name, value in turn.items():
                put(out, names.get(name, name), value, random.Random(1))
            return out

        lists = [
            name for name in row if isinstance(row[name], list) and name not in ("tools", "input_ids", "loss_mask")
        ]
        source = row | {name: [renamed(turn) for turn in row[name]] for name in lists}
        if rng.random() < 0.3:
            source |= {name: json.dumps(source[name]) for name in lists if not turn_names or name == "messages"}
        used = {name for listed in lists for turn in row[listed] for name in turn}
        source, fields = moved(source, ROW_TARGETS, "row", rng)
        turn_fields = {name: path for name, path in turn_names.items() if name in used}
        mapping = RowMapping.of(fields, turn_fields, {name: role for role, name in roles.items()})
        before = repr(source)
        got, label = read_row(source, RowOptions(mapping=mapping, **options))
        wanted, wanted_label = read_row(row, RowOptions(**options))
        strip = [
            [{k: v for k, v in m.items() if k not in ("id", "body")} for m in getattr(s, "messages", [])] for s in got
        ]
        assert label == wanted_label
        if kind in ("text", "tokenized"):
            assert row_hash(got).tolist() == row_hash(wanted).tolist()
        else:
            assert strip == [each.messages for each in wanted]
            assert [(s.weights, s.tools) for s in got] == [(s.weights, s.tools) for s in wanted]
        assert repr(source) == before
        assert mapping.paths_in(source) == set(mapping.all_paths())


END_TO_END = {
    "--fields": (
        lambda row: {"meta": {"turns": row["messages"], "sys": "Be brief."}, "messages": "not these"},
        ("--fields", "messages=meta.turns", "system=meta.sys"),
    ),
    "--turn-fields": (
        lambda row: {
            "messages": [{"speaker": turn["role"], "text": {"en": turn["content"]}} for turn in row["messages"]],
            "system": "Be brief.",
        },
        ("--turn-fields", "role=speaker", "--turn-fields", "content=text.en"),
    ),
    "--roles": (
        lambda row: {
            "messages": [turn | {"role": {"user": "Kunde"}.get(turn["role"], "AGENT")} for turn in row["messages"]],
            "system": "Be brief.",
        },
        ("--roles", "kunde=user", "agent=assistant"),
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("option", END_TO_END)
def test_the_shard_of_a_mapped_file_is_that_of_the_plain_one(tmp_path, option):
    change, flags = END_TO_END[option]
    rng = random.Random(option)
    turns = [
        [{"role": "user", "content": f"Q{rng.random()}"}, {"role": "assistant", "content": "A"}] for _ in range(30)
    ]
    rows = [{"messages": pair, "system": "Be brief."} for pair in turns]
    (tmp_path / "plain").mkdir()
    (tmp_path / "mapped").mkdir()
    assert preprocess(tmp_path / "plain/s", rows=rows).code == 0
    made = preprocess(tmp_path / "mapped/s", *flags, "--workers", 2, rows=[change(row) for row in rows])
    assert made.code == 0, made.err
    plain, mapped = files_of(tmp_path / "plain/s"), files_of(tmp_path / "mapped/s")
    for name in (".bin", ".loss.bin", ".idx", ".seq.bin"):  # the other files contain the options, or a checksum of them
        assert plain[name] == mapped[name]
    catalog = tmp_path / "catalog"
    produced = command(
        *("produce", "--input", tmp_path / "mapped/rows.jsonl", "--tokenizer", TOKENIZER, "--seq-length", 1024),
        *("--tokens-per-shard", 100000, "--catalog", catalog, "--workers", 0, *flags),
    )
    assert produced.code == 0, produced.err
    (shard,) = catalog.glob("*.loss.bin")
    assert sum(shard.read_bytes()) == sum(plain[".loss.bin"])


SLIPS = [
    (
        ("--fields", "mesages=chat"),
        2,
        "there is no target 'mesages'; did you mean messages.; targets are messages, prompt",
    ),
    (("--turn-fields", "rol=who"), 2, "no target 'rol'; did you mean role?"),
    (("--roles", "bob=asistant"), 2, "there is no role 'asistant'; did you mean assistant.; roles are system, "),
    (("--fields", "messages=a..b"), 2, "expected TARGET=PATH, such as messages=data.turns"),
    (("--fields", "prompt=q", "completion=q"), 2, "two targets have the same path"),
    (("--fields", "messages"), 2, "expected NAME=VALUE"),
    (("--fields", "messages=a", "--fields", "messages=b"), 2, "messages is given twice"),
    (("--fields", "chosen=a"), 2, "--fields chosen=a needs --row-kind preference"),
    (("--row-kind", "text"), 2, "--row-kind text needs --train-on all"),
    (
        ("--fields", "messages=data.turn"),
        1,
        "data.turn does not occur in any of 3 rows; did you mean data.turns",
    ),
    (
        ("--fields", "messages=data.turns", "system=data.sys"),
        1,
        "data.sys does not occur in any of 3 rows; the rows have id, data.turns.0.who",
    ),
    (
        ("--fields", "messages=data.turns", "--turn-fields", "role=who", "content=what", "name=nickname"),
        1,
        "--turn-fields: nickname does not occur in any turn of 3 rows",
    ),
    (("--fields", "messages=data.turns"), 1, r"messages\[0\] has no role; .* --turn-fields role=PATH"),
]


@pytest.mark.parametrize(("flags", "code", "message"), SLIPS, ids=range(len(SLIPS)))
def test_a_slip_is_named(tmp_path, flags, code, message):
    turns = [{"who": "user", "what": "Q"}, {"who": "assistant", "what": "A"}]
    made = preprocess(tmp_path / "s", *flags, rows=[{"id": 1, "data": {"turns": turns}} for _ in range(3)])
    assert made.code == code
    assert re.search(message, made.err), made.err
    assert not list(tmp_path.glob("s.*"))


def test_a_path_that_only_a_late_row_has_is_found(tmp_path):
    rows = [{"q": "Q", "a": "A"} for _ in range(1500)] + [{"q": "Q", "a": "A", "s": {"p": "Be brief."}}]
    made = preprocess(tmp_path / "s", "--fields", "prompt=q", "completion=a", "system=s.p", rows=rows)
    assert made.code == 0, made.err


def test_a_row_without_the_mapped_fields_lists_its_own():
    options = RowOptions(mapping=RowMapping.of({"messages": "data.turns"}))
    with pytest.raises(
        RowError, match=r"the row has no data\.turns, which --fields maps; it has x, data\.turn\.0\.role"
    ):
        read_row({"x": 1, "data": {"turn": [{"role": "user"}]}}, options)


def test_names_with_dots_are_found_whole():
    row = {"chat.turns": "[]", "chat": {"turns": 7}, "a.b": {"c": "Q"}, "x": [["A"]]}
    mapping = RowMapping.of({"prompt": "a.b.c", "completion": "x.0.0"})
    assert mapping.apply(row) == {"chat.turns": "[]", "chat": {"turns": 7}, "a.b": {"c": "Q"}, "x": [["A"]]} | {
        "prompt": "Q",
        "completion": "A",
    }
    assert RowMapping.of({"messages": "chat.turns"}).apply(row)["messages"] == "[]"


TRAINED = {"role": "assistant", "content": "A"}
UNTRAINED = [
    # A field that controls training, anywhere in an object that a path leads into.
    ({"m": TRAINED | {"weight": 0}}, {"role": "m.role", "content": "m.content"}),
    ({"who": "assistant", "m": {"text": "A", "train": False}}, {"role": "who", "content": "m.text"}),
    ({"who": "assistant", "m": {"inner": {"text": "A"}, "loss": 0}}, {"role": "who", "content": "m.inner.text"}),
    ({"who": "assistant", "m": '{"text": "A", "loss_weight": 0.0}'}, {"role": "who", "content": "m.text"}),
    ({"who": "assistant", "text": "A", "w": 0}, {"role": "who", "content": "text", "weight": "w"}),
]


@pytest.mark.parametrize(("turn", "names"), UNTRAINED, ids=range(len(UNTRAINED)))
def test_fields_of_training_in_an_object_count(turn, names):
    mapping = RowMapping.of(turn_fields=names)
    (source,), _ = read_row({"messages": [{"role": "user", "content": "Q"}, turn]}, RowOptions(mapping=mapping))
    assert source.weights == [1, 0]
    assert source.messages[1]["content"] == "A"


def test_a_turn_without_the_mapped_object_keeps_its_words():
    calls = [{"name": "look", "arguments": {}}]
    turns = [{"role": "user", "content": {"text": "Q"}}, {"role": "assistant", "content": "A", "tool_calls": calls}]
    mapping = RowMapping.of(turn_fields={"content": "content.text"})
    (source,), _ = read_row({"messages": turns}, RowOptions(mapping=mapping))
    assert [message["content"] for message in source.messages] == ["Q", "A"]
    calls_in_object = [{"m": {"role": "user", "content": "Q"}}, {"m": {"role": "assistant", "tool_calls": calls}}]
    mapping = RowMapping.of(turn_fields={"role": "m.role", "content": "m.content"})
    (source,), _ = read_row({"messages": calls_in_object}, RowOptions(mapping=mapping))
    assert source.messages[1]["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize(
    ("turns", "names"),
    [
        ([{"from": "human", "text": "Q"}, {"from": "gpt", "text": "A"}], {"content": "text"}),
        ([{"who": "human", "value": "Q"}, {"who": "gpt", "value": "A"}], {"role": "who"}),
        ([{"bot": False, "content": "Q"}, {"bot": True, "content": "A"}], {"role": "bot"}),
        ([{"bot": 0.0, "content": "Q"}, {"bot": 1.0, "content": "A"}], {"role": "bot"}),
    ],
)
def test_half_of_a_turn_may_have_its_usual_name(turns, names):
    roles = {"false": "user", "true": "assistant", "0": "user", "1": "assistant"}
    mapping = RowMapping.of({}, names, roles)
    (source,), _ = read_row({"conversations": turns}, RowOptions(mapping=mapping))
    assert source.messages == [{"role": "user", "content": "Q"}, TRAINED]


def test_what_stands_next_to_mapped_messages_counts():
    turns = [{"role": "user", "content": "Q"}, TRAINED]
    mapping = RowMapping.of({"messages": "data.turns"})
    row = {"data": {"turns": turns, "system": "S", "score": 3}}
    (source,), _ = read_row(row, RowOptions(mapping=mapping))
    assert source.messages[0] == {"role": "system", "content": "S"}
    with pytest.raises(RowError, match="the row has train"):
        read_row({"data": {"turns": turns, "train": False}}, RowOptions(mapping=mapping))
    with pytest.raises(RowError, match="label is false"):
        read_row({"data": {"turns": turns, "label": False}}, RowOptions(mapping=mapping))
    with pytest.raises(RowError, match="the row and an object in it have different values for system"):
        read_row({"system": "T", "data": {"turns": turns, "system": "S"}}, RowOptions(mapping=mapping))


@pytest.mark.parametrize(
    "targets",
    [("messages", "completion"), ("messages", "prompt"), ("messages", "text"), ("prompt", "completion", "text")],
)
def test_targets_that_no_row_has_together(targets):
    mapping = RowMapping.of({target: f"f{n}" for n, target in enumerate(targets)})
    row = {f"f{n}": "words" for n in range(len(targets))}
    with pytest.raises(RowError, match=f"--fields maps {' and '.join(targets)}, and the row has all of them"):
        read_row(row, RowOptions(mapping=mapping))


SETTINGS = [
    (lambda: RowMapping.of(turn_fields={"train": "m.masked"}), "masked means the opposite of train"),
    (lambda: RowMapping.of(roles={"Agent": "user", "AGENT": "assistant"}), "is mapped to user"),
    (
        lambda: RowOptions(mapping=RowMapping.of(turn_fields={"weight": "w"}), ignore_fields=("w",)),
        "--ignore-field w: the field is also mapped",
    ),
]


@pytest.mark.parametrize(("make", "reason"), SETTINGS, ids=range(len(SETTINGS)))
def test_mappings_that_contradict(make, reason):
    with pytest.raises(FormatError, match=reason):
        make()


def test_a_huge_index_is_no_index():
    with pytest.raises(RowError, match=r"the row has no s\.9+, which --fields maps"):
        read_row({"s": ["x"]}, RowOptions(mapping=RowMapping.of({"messages": "s." + "9" * 5000})))


def test_text_that_looks_like_turns_stays_text():
    mapping = RowMapping.of(turn_fields={"role": "who"})
    for text in ("[1,2,3]", '["a", "b"]', '[{"a": 1}]'):
        (source,), _ = read_row({"input": text, "output": "A"}, RowOptions(mapping=mapping))
        assert source.messages[0]["content"] == text


@pytest.mark.parametrize("key", ["messages", "completion", "chosen"])
def test_names_that_change_places_are_mapped_once(key):
    turn = {"role": "words", "content": "assistant"}
    mapping = RowMapping.of(turn_fields={"role": "content", "content": "role"})
    assert mapping.apply({key: [turn]}) == {key: [{"role": "assistant", "content": "words"}]}


def test_reasoning_of_messages_is_not_that_of_a_row():
    mapping = RowMapping.of({"reasoning_content": "why"})
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    with pytest.raises(RowError, match="map the reasoning of each message with --turn-fields"):
        read_row({"messages": turns, "why": "T"}, RowOptions(mapping=mapping))
    (source,), _ = read_row({"prompt": "Q", "completion": "A", "why": "T"}, RowOptions(mapping=mapping))
    assert source.messages[-1] == {"role": "assistant", "content": "A", "reasoning_content": "T"}


def test_a_mapping_must_be_of_strings():
    with pytest.raises(FormatError, match="no target"):
        RowMapping.of({"conversation": "x"})
