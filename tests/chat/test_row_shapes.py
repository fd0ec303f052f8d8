"""Row shapes of public data sets, with made-up content: their messages, and which of them are trained."""

import json

import pytest
from chats import TOKENIZER, preprocess, sequences_of

from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.tokenizer import load_tokenizer
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.tokenize.encoding import read_row

CALL = {"name": "look", "arguments": {"place": "garden"}}
TOOL = {"name": "look", "description": "Looks.", "parameters": {"place": {"type": "str", "description": "Where."}}}


def said(*texts, system=None):
    """Return alternating messages of the user and the assistant."""
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, texts, strict=False)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


def called(text, *calls):
    functions = [{"type": "function", "function": call} for call in calls]
    return [{"role": "user", "content": text}, {"role": "assistant", "tool_calls": functions}]


# Name: the row, its messages, and their weights if not all are 1.
SHAPES = {
    "NeMo, Megatron-Bridge": ({"input": "Q", "output": "A", "original_answers": ["A"]}, said("Q", "A")),
    "Nemotron": (
        {
            "input": said("Q", "B", "R"),
            "output": "A",
            "reasoning": "on",
            "used_in_training": "yes",
            "system_prompt": "detailed thinking on",
        },
        said("Q", "B", "R", "A", system="detailed thinking on"),
        [1, 0, 0, 0, 1],
    ),
    "NeMo chat": (
        {
            "mask": "User",
            "system": "S",
            "conversations": [{"from": "User", "value": "Q"}, {"from": "Assistant", "value": "A"}],
        },
        said("Q", "A", system="S"),
    ),
    "xLAM": (
        {"id": 0, "query": "Q", "tools": json.dumps([TOOL]), "answers": json.dumps([CALL, CALL])},
        called("Q", CALL, CALL),
    ),
    "xLAM, of objects": ({"query": "Q", "tools": [TOOL], "answers": [CALL]}, called("Q", CALL)),
    "Firefly, MOSS": (
        {"conversation_id": 1, "conversation": [{"human": "Q", "assistant": "A"}, {"human": "R", "assistant": "B"}]},
        said("Q", "A", "R", "B"),
    ),
    "ms-swift": (
        {"system": "S", "conversation": [{"human": "Q", "assistant": "A"}]},
        said("Q", "A", system="S"),
    ),
    "pairs of user and bot": ({"messages": [{"user": "Q", "bot": "A"}]}, said("Q", "A")),
    "pairs as JSON text": ({"conversations": '[{"user": "Q", "gpt": "A"}]'}, said("Q", "A")),
    "Capybara": (
        {"source": "x", "conversation": [{"input": "Q", "output": "A"}, {"input": "R", "output": "B"}]},
        said("Q", "A", "R", "B"),
    ),
    "XTuner": (
        {
            "conversation": [
                {"system": "S", "input": "Q", "output": "A", "output_with_loss": False},
                {"system": "", "input": "R", "output": "B", "output_with_loss": True},
            ]
        },
        said("Q", "A", "R", "B", system="S"),
        [1, 1, 0, 1, 1],
    ),
    "LIMA": ({"conversations": ["Q", "A", "R", "B"], "source": "multi_turn"}, said("Q", "A", "R", "B")),
    "s1K": (
        {
            "question": "Q",
            "solution": "10",
            "attempt": "A",
            "cot": None,
            "thinking_trajectories": ["T", "U"],
            "metadata": "{}",
        },
        [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "reasoning_content": "T\nU"}],
    ),
    "OpenMathReasoning": (
        {"problem": "Q", "generated_solution": "<think>T</think>A", "expected_answer": "4", "pass_rate_72b_tir": "0.9"},
        said("Q", "<think>T</think>A"),
    ),
    "OpenMathInstruct-1": ({"question": "Q", "generated_solution": "A", "is_correct": True}, said("Q", "A")),
    "FLAN": ({"inputs": "Q", "targets": "A", "task": "x"}, said("Q", "A")),
    "Firefly, of one turn": ({"kind": "x", "input": "Q", "target": "A"}, said("Q", "A")),
    "roles in any case": (
        {"messages": [{"role": "USER", "content": "Q"}, {"role": "Assistant", "content": "A"}]},
        said("Q", "A"),
    ),
    "ShareGPT's names as roles": (
        {"messages": [{"role": "Human", "content": "Q"}, {"role": "gpt", "content": "A"}]},
        said("Q", "A"),
    ),
    "speakers of other models": (
        {"conversations": [{"from": "prompter", "value": "Q"}, {"from": "Bard", "value": "A"}]},
        said("Q", "A"),
    ),
    "a call as content": (
        {"messages": [said("Q")[0], {"role": "tool_call", "content": json.dumps(CALL)}]},
        called("Q", CALL),
    ),
    "Alpaca with its reasoning": (
        {"instruction": "Q", "reasoning_content": "T", "output": "A"},
        [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "reasoning_content": "T"}],
    ),
    "prompt, completion and history": (
        {"prompt": "R", "completion": "B", "history": [["Q", "A"]]},
        said("Q", "A", "R", "B"),
    ),
    "messages and a text": ({"prompt": said("Q"), "completion": "A"}, said("Q", "A"), [0, 1]),
    "tools with the system prompt": (
        {"messages": [{"role": "system", "content": "S", "tools": json.dumps([TOOL])}, *called("Q", CALL)]},
        [{"role": "system", "content": "S"}, *called("Q", CALL)],
    ),
    "reasoning under two names": (
        {"messages": said("Q", "<think>T</think>A"), "reasoning": "T"},
        said("Q", "<think>T</think>A"),
    ),
    # Columns without words of the prompt or the answer.
    "a flag of reasoning": ({"prompt": "Q", "response": "A", "thinking": "off"}, said("Q", "A")),
    "a rendered copy of the prompt": (
        {"instruction": "Q", "output": "A", "prompt": "Below is an instruction.\nQ\n", "text": "Q A"},
        said("Q", "A"),
    ),
    "the code of the answer": ({"input": "Q", "output": "A: `f`", "solution": "f"}, said("Q", "A: `f`")),
    "one answer under two names": ({"prompt": "Q", "output": "A", "response": "A"}, said("Q", "A")),
    "messages with their prompt": ({"prompt": "Q", "messages": said("Q", "A"), "answer": "4"}, said("Q", "A")),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_read(name):
    row, messages, *weights = SHAPES[name]
    (source,), _ = read_row(row, RowOptions())
    read = [{key: value for key, value in message.items() if key != "content" or value} for message in source.messages]
    assert read == messages
    assert source.weights == (weights[0] if weights else [1] * len(messages))
    if "tools" in str(row):
        assert [tool["function"]["name"] for tool in source.tools] == ["look"]


def test_chosen_and_rejected_messages():
    rows = [said("Q", answer) for answer in ("good", "bad")]
    row = {"chosen_messages": rows[0], "rejected_messages": rows[1]}
    pair, _ = read_row(row, RowOptions(kind="preference"))
    assert [source.messages for source in pair] == rows
    assert [source.weights for source in pair] == [[0, 1], [0, 1]]
    with pytest.raises(RowError, match=r"a preference pair \(chosen_messages, rejected_messages\)"):
        read_row(row, RowOptions())


IGNORE = "--ignore-field {} to"
# The row, and the column in the error message.
REFUSED = {
    "a pair with more words": (
        {"conversation": [{"human": "Q", "assistant": "A", "inner_thoughts": "T"}]},
        "inner_thoughts",
    ),
    "reasoning next to an answer": ({"question": "Q", "reasoning": "T", "answer": "A"}, "reasoning"),
    "reasoning of another name": ({"instruction": "Q", "Complex_CoT": "T", "output": "A"}, "Complex_CoT"),
    "reasoning next to a completion": ({"prompt": "Q", "thinking": ["T"], "completion": "A"}, "thinking"),
    "reasoning next to messages": ({"messages": said("Q", "A"), "reasoning_content": "T"}, "reasoning_content"),
    "history next to messages": ({"messages": said("Q", "A"), "history": [["R", "B"]]}, "history"),
    "a short reference": ({"question": "Q", "solution": "because ... 4", "answer": "4"}, "solution"),
    "options": ({"question": "Q", "choices": {"text": ["x", "y"]}, "answer": "B"}, "choices"),
    "documents": ({"question": "Q", "documents": [{"text": "D"}], "answer": "A"}, "documents"),
    "earlier turns": ({"chat_history": said("R", "B"), "question": "Q", "answer": "A"}, "chat_history"),
    "two prompts": ({"instruction": "Do", "question": "Q", "answer": "A"}, "question"),
    "two inputs": ({"instruction": "Do", "input": "I", "context": "C", "output": "A"}, "context"),
    "two answers": ({"query": "Q", "output": "A", "answer": "4"}, "answer"),
    "a corrected answer": ({"instruction": "Q", "output": "A", "corrected": "B"}, "corrected"),
    "a wrong answer": ({"question": "Q", "answer": "A", "is_correct": False}, "is_correct"),
    "a wrong solution": ({"question": "Q", "generated_solution": "A", "is_correct": False}, "is_correct"),
    "a wrong answer, as text": ({"question": "Q", "answer": "A", "is_correct": "False"}, "is_correct"),
    "a wrong answer, as a number": ({"prompt": "Q", "completion": "A", "is_right": 0}, "is_right"),
    "an instruction next to an input": ({"instruction": "Translate", "input": "x", "target": "y"}, "instruction"),
    "a context next to a solution": ({"question": "Q", "context": "C", "generated_solution": "A"}, "context"),
    "a question next to a prompt": ({"prompt": "Q", "completion": "A", "question": "Another?"}, "question"),
    "an output next to a completion": ({"prompt": "Q", "completion": "A", "output": "Another."}, "output"),
    "calls next to an answer": ({"query": "Q", "answer": "A", "answers": json.dumps([CALL])}, "answers"),
    "other conversations": ({"messages": said("Q", "A"), "conversations": said("R", "B")}, "conversations"),
    "an answer to the last message": ({"messages": said("Q", "A", "R"), "response": "B"}, "response"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_words_that_are_not_read_refuse_a_row(name):
    row, column = REFUSED[name]
    with pytest.raises(RowError, match=IGNORE.format(column)):
        read_row(row, RowOptions())
    read_row(row, RowOptions(ignore_fields=(column,)))


BAD = [
    ({"conversations": ["Q", "A", "R"]}, "conversations has 3 strings, expected an even number"),
    ({"conversations": ["Q", {"role": "assistant"}]}, r"conversations\[1\] is an object, expected a string"),
    (
        {"conversation": [{"input": "", "output": "a book"}]},
        r"conversation\[0\].input is empty, so its output has no question",
    ),
    (
        {"conversation": [{"human": "Q", "assistant": "A"}, {"human": "R"}]},
        r"conversation\[1\] has no question and answer",
    ),
    (
        {"conversation": [{"input": "Q", "output": "A"}, {"system": "S", "input": "R", "output": "B"}]},
        r"conversation\[1\] has a different system prompt",
    ),
    ({"query": "Q", "tools": [TOOL], "answers": "[]"}, "answers is .*, so there is nothing to"),
    ({"query": "Q", "answers": ["A"]}, r"answers.tool_calls\[0\] is a string, expected an object with name"),
    ({"problem": "Q", "generated_solution": "n/a"}, "generated_solution is 'n/a', so there is nothing to"),
    ({"problem": "Q", "solution": "S", "answer": "4"}, "no columns of a chat"),
    ({"question": "Q", "deepseek_attempt": "A", "gemini_attempt": "B"}, "no columns of a chat"),
    ({"messages": [{"role": "agent", "content": "A"}]}, "has the role 'agent'; .*--roles NAME=ROLE"),
    ({"text": "a book"}, "the row has only text, without roles: pass --train-on all"),
    ({"inputs": "2+2?", "targets": ["4", "four"]}, "targets is a list, expected a string"),
    ({"question": "Q", "attempt": ["a"], "thinking_trajectories": ["T"]}, "attempt is a list, expected a string"),
    ({"input": said("Q"), "output": ["A", "B"]}, r"output\[0\] is a string, expected an object"),
    ({"messages": ['{"role": "user"}', '{"role": "assistant"}']}, "a string that begins with its speaker"),
    ({"messages": ["user: hi", "assistant: hello"]}, "a string that begins with its speaker"),
    ({"prompt": str(said("Q")), "completion": "A"}, "in Python's format, not JSON"),
]


@pytest.mark.parametrize(("row", "reason"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_read_is_refused(row, reason):
    with pytest.raises(RowError, match=reason):
        read_row(row, RowOptions())


PAIR = {"question": "Q", "chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize(
    ("more", "column"),
    [
        ({"reasoning_content": "T"}, "reasoning_content"),
        ({"options": ["x", "y"]}, "options"),
        ({"chosen_response": "better"}, "chosen_response"),
        ({"instruction": "Do something else."}, "question"),
    ],
)
def test_words_that_a_pair_does_not_read_refuse_it(more, column):
    with pytest.raises(RowError, match=IGNORE.format(column)):
        read_row(PAIR | more, RowOptions(kind="preference"))
    read_row(PAIR | more, RowOptions(kind="preference", ignore_fields=(column,)))


def test_reasoning_reaches_the_answer_in_every_form():
    for row in (
        {"prompt": said("Q"), "completion": "A"},
        {"input": said("Q"), "output": "A"},
        {"inputs": "Q", "targets": "A"},
        {"problem": "Q", "generated_solution": "A"},
        {"prompt": "Q", "response": "A"},
    ):
        (source,), _ = read_row(row | {"reasoning_content": "T"}, RowOptions())
        assert source.messages[-1] == {"role": "assistant", "content": "A", "reasoning_content": "T"}
        options = RowOptions(kind="kto")
        (source,), label = read_row(row | {"reasoning_content": "T", "label": 1.0}, options)
        assert (source.messages[-1]["reasoning_content"], label) == ("T", 1)
    with pytest.raises(RowError, match="reasoning_content is for rows with one prompt and one answer"):
        read_row({"prompt": said("Q"), "completion": [said("Q", "A")[1]], "reasoning_content": "T"}, RowOptions())


def test_messages_in_the_text_of_a_table():
    prompt = json.dumps(said("Q", "B", "R", system="S"))
    (source,), _ = read_row({"prompt": prompt, "completion": "A"}, RowOptions())
    assert source.messages == said("Q", "B", "R", "A", system="S")
    (source,), _ = read_row(
        {"prompt": prompt, "completion": json.dumps([{"role": "assistant", "content": "A"}])}, RowOptions()
    )
    assert source.messages == said("Q", "B", "R", "A", system="S")
    # An answer with such text stays text if the prompt is not such text.
    (source,), _ = read_row({"input": said("Q"), "output": prompt}, RowOptions())
    assert source.messages == said("Q", prompt)
    (source,), _ = read_row({"prompt": "R", "response": "B", "history": '[["Q", "A"]]'}, RowOptions())
    assert source.messages == said("Q", "A", "R", "B")
    (source,), _ = read_row({"input_ids": "[5, 6, 7]", "loss_mask": "[0, 1, 1]"}, RowOptions())
    assert (source.input_ids.tolist(), source.loss_mask.tolist()) == ([5, 6, 7], [0, 1, 1])


def test_plain_text_is_trained_as_a_whole(tmp_path):
    tokenizer = load_tokenizer(str(TOKENIZER))
    texts = ["A first text.\n", "Another one, which spells <|im_end|> and goes on."]
    rows = [{"text": text, "url": "x"} for text in texts]
    refused = preprocess(tmp_path / "refused", rows=rows)
    assert refused.code == 1
    assert "rows.jsonl:1: the row has only text" in refused.err
    made = preprocess(tmp_path / "s", "--train-on", "all", "--packing", "none", "--append-eod", rows=rows)
    assert made.code == 0, made.err
    for (ids, mask), text in zip(sequences_of(tmp_path / "s"), texts, strict=True):
        assert mask.tolist() == [0] + [1] * (len(ids) - 1)
        assert tokenizer.decode(ids[:-1]) == text
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.eos_id not in ids[:-1]
    for more in ({"prompt": "Q"}, {"segments": [{"label": False, "text": "x"}]}, {"is_correct": False}):
        refused = preprocess(tmp_path / "refused", "--train-on", "all", rows=[rows[0] | more])
        assert (refused.code, f"--ignore-field {next(iter(more))} to" in refused.err) == (1, True)
    mapped = preprocess(
        *(tmp_path / "m", "--train-on", "all", "--packing", "none", "--append-eod", "--fields", "text=body.raw"),
        rows=[{"body": {"raw": text}, "messages": []} for text in texts],
    )
    assert mapped.code == 0, mapped.err
    assert (tmp_path / "m.bin").read_bytes() == (tmp_path / "s.bin").read_bytes()
