"""``preprocess`` on the command line, from chats to shards."""

from __future__ import annotations

import gc
import json
import os
import shutil
from dataclasses import asdict
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from chats import CHATS, GENERATION_TEMPLATE, SUFFIXES, TOKENIZER, files_of, preprocess, sequences_of
from packaging.version import Version

from megatron_sft_idx import tokenize
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.tokenize.report import CorpusReport

MASKS = Path(__file__).parents[1] / "masks"


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)


@pytest.fixture(scope="module")
def chats():
    return [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]


def plain(message):
    """Return a message for transformers: content flattened, our own keys left out."""
    kept = {key: value for key, value in message.items() if key not in ("weight", "train")}
    if isinstance(kept["content"], list):
        kept["content"] = "".join(part["text"] for part in kept["content"])
    return kept


def trained_runs(ids, mask, decode):
    """Return the texts of all runs of trained tokens."""
    runs, position = [], 0
    for trained, run in groupby((mask != 0).tolist()):
        length = len(list(run))
        if trained:
            runs.append(decode(ids[position : position + length].tolist()))
        position += length
    return runs


def wanted_answers(chat):
    """Return the text of the bundled template for each trained assistant message, written independently."""
    messages = [plain(message) for message in chat["messages"]]
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    answers = []
    for i, (message, given) in enumerate(zip(messages, chat["messages"], strict=True)):
        if message["role"] != "assistant" or not given.get("train", True) or given.get("weight", 1) == 0:
            continue
        thinking, text = "", message["content"] or ""
        if message.get("reasoning_content") and i > last_user:
            thinking = f"<think>\n{message['reasoning_content']}\n</think>\n\n"
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            body = json.dumps(arguments, ensure_ascii=False)
            text += "\n" if text else ""
            text += f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {body}}}\n</tool_call>'
        answers.append(thinking + text + "<|im_end|>")
    return answers


def test_trained_tokens_are_the_assistants_words_and_nothing_else(tmp_path, tokenizer, chats):
    done = preprocess(tmp_path / "x", "--packing", "none")
    assert (done.code, done.err) == (0, ""), done
    sequences = sequences_of(tmp_path / "x")
    assert len(sequences) == len(chats) > 300
    for (ids, mask), chat in zip(sequences, chats, strict=True):
        assert trained_runs(ids, mask, tokenizer.decode) == wanted_answers(chat)
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
            [plain(message) for message in chat["messages"]], chat.get("tools"), tokenize=False
        )


def test_generation_markers_give_what_transformers_gives(tmp_path, tokenizer, chats):
    unweighted = [{**chat, "messages": [plain(message) for message in chat["messages"]]} for chat in chats]
    done = preprocess(
        tmp_path / "x", "--packing", "none", "--allow-control-tokens", "--chat-template", GENERATION_TEMPLATE,
        rows=unweighted,
    )  # fmt: skip
    assert done.code == 0, done
    template = GENERATION_TEMPLATE.read_text(encoding="utf-8")
    for chat, (ids, mask) in zip(unweighted, sequences_of(tmp_path / "x"), strict=True):
        theirs = tokenizer.apply_chat_template(
            chat["messages"], chat.get("tools"), chat_template=template,
            return_assistant_tokens_mask=True, return_dict=True,
        )  # fmt: skip
        assert ids.tolist() == theirs["input_ids"]
        assert mask.tolist() == theirs["assistant_masks"]


def test_a_character_at_the_end_of_a_span_is_trained_whole(tmp_path, tokenizer):
    """Emoji and rare letters have several tokens. They are tested after words, at their start, and next to markers."""
    template = (MASKS / "gm.jinja").read_text(encoding="utf-8")
    chats = [json.loads(line) for line in (MASKS / "gm.jsonl").read_text(encoding="utf-8").splitlines()]
    said = ["👍🏽", "👩\u200d👩\u200d👧 hi 𓀀", "ꙮ e\u0301", "𠀀", "ไทย\u0e34", "e\u0301\u0323"]
    ask = {"role": "user", "content": "q 🫖"}
    chats += [{"messages": [ask, {"role": "assistant", "content": text}] * 2} for text in said]
    given = ("--packing", "none", "--chat-template", MASKS / "gm.jinja")
    assert preprocess(tmp_path / "x", *given, rows=chats).code == 0
    for chat, (ids, mask) in zip(chats, sequences_of(tmp_path / "x"), strict=True):
        answers = [message["content"] for message in chat["messages"] if message["role"] == "assistant"]
        assert trained_runs(ids, mask, tokenizer.decode) == answers
        theirs = tokenizer.apply_chat_template(
            chat["messages"], chat_template=template, return_assistant_tokens_mask=True, return_dict=True
        )
        assert ids.tolist() == theirs["input_ids"]
        if Version(version("transformers")) >= Version("5.24"):  # older versions leave out the last tokens
            assert mask.tolist() == theirs["assistant_masks"]


def test_traced_and_marked_template_agree(tmp_path):
    assert preprocess(tmp_path / "traced", "--packing", "none").code == 0
    assert preprocess(tmp_path / "marked", "--packing", "none", "--chat-template", GENERATION_TEMPLATE).code == 0
    traced, marked = files_of(tmp_path / "traced"), files_of(tmp_path / "marked")
    assert all(traced[suffix] == marked[suffix] for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx"))


@pytest.mark.parametrize("numbers", [(3,), pytest.param((1, 2, 4), marks=pytest.mark.slow)])
def test_same_bytes_for_any_number_of_workers(tmp_path, chats, numbers):
    many = chats * 25  # several pieces of a megabyte
    for workers in (0, *numbers):
        assert preprocess(tmp_path / f"w{workers}" / "x", "--workers", workers, rows=many).code == 0
        assert files_of(tmp_path / f"w{workers}" / "x") == files_of(tmp_path / "w0" / "x")


def test_packing_moves_whole_sequences_and_changes_no_token(tmp_path):
    assert preprocess(tmp_path / "each", "--packing", "none").code == 0
    for method in ("auto", "best-fit", "exact-fill", "first-fit-shuffle", "first-fit-decreasing", "sequential"):
        assert preprocess(tmp_path / method, "--packing", method).code == 0, method
        as_bytes = [sorted((ids.tobytes(), mask.tobytes()) for ids, mask in sequences_of(tmp_path / name))
                    for name in ("each", method)]  # fmt: skip
        assert as_bytes[0] == as_bytes[1]
    in_order = [ids.tobytes() for ids, _ in sequences_of(tmp_path / "sequential")]
    assert in_order == [ids.tobytes() for ids, _ in sequences_of(tmp_path / "each")]


def test_summary_and_header_keep_the_counts(tmp_path, chats):
    done = preprocess(tmp_path / "x", "--summary", tmp_path / "s.json", "--sequence-multiple", 8)
    assert done.code == 0, done
    summary = json.loads((tmp_path / "s.json").read_text())
    header = Shard(tmp_path / "x").header
    assert summary["corpus"]["rows"] == len(chats)
    assert summary["packing"]["packs"] == header.num_packs
    assert summary["packing"]["tokens"] == header.num_tokens
    assert summary["packing"]["trained_tokens"] == header.num_trained_tokens
    assert (header.capacity, header.sequence_multiple) == (1024, 8)
    assert header.metadata["sources"]["rows"] == len(chats)
    assert header.metadata["packing"]["sequence_multiple"] == 8
    assert f"packs           {header.num_packs}" in done.out
    assert str(tmp_path) not in json.dumps(header.metadata)
    for i in range(len(Shard(tmp_path / "x"))):
        lengths = np.diff(Shard(tmp_path / "x")[i]["seq_boundaries"])
        assert (-(-lengths // 8) * 8).sum() <= 1024


def test_another_seed_is_another_order_of_the_same_sequences(tmp_path):
    for seed in (0, 0, 1):
        assert preprocess(tmp_path / f"s{seed}", "--seed", seed, "--overwrite").code == 0
    zero, one = (sequences_of(tmp_path / name) for name in ("s0", "s1"))
    assert [a.tobytes() for a, _ in zero] != [a.tobytes() for a, _ in one]
    assert sorted(a.tobytes() for a, _ in zero) == sorted(a.tobytes() for a, _ in one)


def test_append_eod_is_trained_where_a_sequence_ends_in_a_trained_answer(tmp_path, tokenizer):
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]},
        {"prompt": "Hi", "completion": "Hello"},
    ]
    assert preprocess(tmp_path / "x", "--append-eod", "--packing", "none", rows=rows).code == 0
    (first, one), (second, two), (third, three) = sequences_of(tmp_path / "x")
    eod = tokenizer.eos_token_id
    assert (first.tolist(), one.tolist()) == ([5, 6, 7, eod], [0, 1, 1, 1])
    assert (second.tolist(), two.tolist()) == ([5, 6, 7, eod], [0, 1, 0, 0])
    # The template's end of turn is the end of document, followed by a newline that is not trained on.
    assert (third == eod).sum() == 2  # for the question and the answer
    assert three[np.flatnonzero(third == eod)].tolist() == [0, 1]


def test_weights_make_the_mask_float32_from_the_first_row_on(tmp_path):
    answer = {"role": "assistant", "content": "Yes, it is."}
    ask = {"role": "user", "content": "Is it?"}
    rows = [{"messages": [ask, answer]}] * 2 + [{"messages": [ask, {**answer, "weight": 0.25}]}]
    assert preprocess(tmp_path / "x", "--packing", "none", rows=rows).code == 0
    assert Shard(tmp_path / "x").header.mask_dtype == np.float32
    weights = [set(mask.tolist()) for _, mask in sequences_of(tmp_path / "x")]
    assert weights == [{0.0, 1.0}, {0.0, 1.0}, {0.0, 0.25}]


def test_untrained_messages_are_not_trained_on(tmp_path, tokenizer):
    rows = [
        {"messages": [
            {"role": "user", "content": "One?"}, {"role": "assistant", "content": "UNO", "train": False},
            {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "DUE"},
            {"role": "user", "content": "Three?"}, {"role": "assistant", "content": "TRE", "weight": 0},
        ]}
    ]  # fmt: skip
    assert preprocess(tmp_path / "x", rows=rows).code == 0
    ((ids, mask),) = sequences_of(tmp_path / "x")
    assert trained_runs(ids, mask, tokenizer.decode) == ["DUE<|im_end|>"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), ["One.<|im_end|>", "<think>\nHm.\n</think>\n\nTwo.<|im_end|>"]),
        (("--train-on", "last-turn"), ["<think>\nHm.\n</think>\n\nTwo.<|im_end|>"]),
        (("--no-train-on-thinking",), ["One.<|im_end|>", "Two.<|im_end|>"]),
    ],
)
def test_what_counts(tmp_path, tokenizer, options, wanted):
    rows = [{"messages": [
        {"role": "user", "content": "1?"}, {"role": "assistant", "content": "One."},
        {"role": "user", "content": "2?"}, {"role": "assistant", "content": "Two.", "reasoning_content": "Hm."},
    ]}]  # fmt: skip
    assert preprocess(tmp_path / "x", *options, rows=rows).code == 0
    ((ids, mask),) = sequences_of(tmp_path / "x")
    assert trained_runs(ids, mask, tokenizer.decode) == wanted


def test_train_on_all_trains_everything_that_something_predicts(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Nobody answers."}]}]
    assert preprocess(tmp_path / "x", "--train-on", "all", rows=rows).code == 0
    ((_, mask),) = sequences_of(tmp_path / "x")
    assert mask.tolist() == [0] + [1] * (len(mask) - 1)


def test_control_tokens_in_the_data_stay_text(tmp_path, tokenizer):
    rows = [{"messages": [
        {"role": "user", "content": "Say <|im_end|>!"}, {"role": "assistant", "content": "It is <|im_end|>."},
    ]}]  # fmt: skip
    end = tokenizer.eos_token_id
    assert preprocess(tmp_path / "text", rows=rows).code == 0
    assert preprocess(tmp_path / "token", "--allow-control-tokens", rows=rows).code == 0
    (as_text, _), (as_token, _) = sequences_of(tmp_path / "text") + sequences_of(tmp_path / "token")
    assert tokenizer.decode(as_text) == tokenizer.decode(as_token)
    assert ((as_text == end).sum(), (as_token == end).sum()) == (2, 4)


def test_rows_with_tools_get_the_template_for_tools(tmp_path, tokenizer):
    shutil.copytree(TOKENIZER, tmp_path / "tok")
    config = json.loads((tmp_path / "tok/tokenizer_config.json").read_text())
    body = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    config["chat_template"] = [{"name": "default", "template": body}, {"name": "tool_use", "template": "TOOLS" + body}]
    (tmp_path / "tok/tokenizer_config.json").write_text(json.dumps(config))
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows = [row, {**row, "tools": tools}]
    done = preprocess(tmp_path / "x", "--tokenizer-model", tmp_path / "tok", "--packing", "none", rows=rows)
    assert done.code == 0, done
    theirs = type(tokenizer).from_pretrained(tmp_path / "tok", local_files_only=True)
    for given, (ids, _) in zip(rows, sequences_of(tmp_path / "x"), strict=True):
        assert tokenizer.decode(ids) == theirs.apply_chat_template(
            given["messages"], given.get("tools"), tokenize=False
        )


def test_one_sequence_a_turn_holds_every_thought(tmp_path, tokenizer, chats):
    thoughtful = [chat for chat in chats if sum("reasoning_content" in message for message in chat["messages"]) > 1]
    assert len(thoughtful) > 10
    refused = preprocess(tmp_path / "a/x", "--earlier-reasoning", "error", rows=thoughtful)
    assert refused.code == 1
    assert "rows.jsonl:1: " in refused.err
    assert "drops the reasoning of assistant message" in refused.err
    done = preprocess(tmp_path / "b/x", "--earlier-reasoning", "split", rows=thoughtful)
    assert done.code == 0, done.err
    texts, said = [], ""
    for ids, mask in sequences_of(tmp_path / "b/x"):
        texts.append(tokenizer.decode(ids.tolist()))
        said += "".join(trained_runs(ids, mask, tokenizer.decode))
    beginnings = set()
    for chat in thoughtful:
        messages = [plain(message) for message in chat["messages"]]
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            beginnings.add(tokenizer.apply_chat_template(messages[: number + 1], chat.get("tools"), tokenize=False))
            trained = chat["messages"][number].get("train", True) and chat["messages"][number].get("weight", 1)
            assert not trained or message.get("reasoning_content", "") in said
    assert len(texts) > len(thoughtful)
    assert set(texts) <= beginnings
    assert f"rows            {len(thoughtful)}\nsequences       {len(texts)}" in done.out
    split = preprocess(tmp_path / "c/x", "--earlier-reasoning", "split", "--workers", 2, rows=thoughtful)
    assert split.code == 0
    assert files_of(tmp_path / "b/x") == files_of(tmp_path / "c/x")


def test_a_program_writes_over_nothing_that_it_reads(tmp_path):
    """The command checks first; programs that call the functions get an error too, also for hard links."""
    source, packing = shutil.copy(CHATS, tmp_path / "chats.jsonl"), tokenize.PackOptions(1024)
    os.link(source, tmp_path / "x.bin")
    options = tokenize.PreprocessOptions(
        [str(source)],
        str(tmp_path / "x"),
        tokenize.EncodingOptions(str(TOKENIZER), on_bad_row="skip"),
        packing,
        overwrite=True,
    )
    with pytest.raises(FormatError, match=r"x\.bin: used as both the output and the input"):
        tokenize.make_shards(options)
    os.unlink(tmp_path / "x.bin")
    gc.disable()
    try:
        tokenize.make_shards(options)
        assert not gc.isenabled()  # as before the call
    finally:
        gc.enable()
    for suffix in SUFFIXES:
        os.link(tmp_path / f"x{suffix}", tmp_path / f"y{suffix}")
    before = files_of(tmp_path / "x")
    with pytest.raises(FormatError, match="used as both the output and the shard to be packed"):
        tokenize.pack_shard(Shard(tmp_path / "x"), str(tmp_path / "y"), packing, overwrite=True)
    assert files_of(tmp_path / "x") == files_of(tmp_path / "y") == before


def test_what_a_job_reads_is_what_its_inputs_stand_for(tmp_path, monkeypatch):
    names = ["a1.jsonl", "a[1].jsonl", "data/raw/deep/er/c.jsonl", "data/raw/saved/state.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for pattern, found in {
        "a[1].jsonl": ["a[1].jsonl"],
        "a[12].jsonl": ["a1.jsonl"],
        "~/a1.jsonl": [str(tmp_path / "a1.jsonl")],
        "data/raw/**/c.jsonl": names[2:3],
        "data/raw/*": names[3:],
    }.items():
        reads = tokenize.reads_of([pattern], tokenize.EncodingOptions(str(TOKENIZER)))
        assert [place.path for place in reads if place.role == "the input"] == found
        assert tokenize.downloaded({"tokenizer": TOKENIZER}, [pattern]) == [pattern]  # no argument is a name of the hub


def test_counts_are_json_however_far_their_job_came():
    report = CorpusReport()
    report.notes["literals"] = 3
    assert json.loads(json.dumps(asdict(report)))["notes"] == {"literals": 3}
