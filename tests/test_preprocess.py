"""Chats to shards, end to end, through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from chats import (
    CHATS,
    GENERATION_TEMPLATE,
    ROOT,
    TOKENIZER,
    command,
    files_of,
    preprocess,
    remains,
    sequences_of,
    write_rows,
)
from transformers import AutoTokenizer

from megatron_sft_idx.shard import Shard


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)


@pytest.fixture(scope="module")
def chats():
    return [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]


def plain(message):
    """A message as transformers takes it: content flattened, our own keys left out."""
    kept = {key: value for key, value in message.items() if key not in ("weight", "train")}
    if isinstance(kept["content"], list):
        kept["content"] = "".join(part["text"] for part in kept["content"])
    return kept


def trained_runs(ids, mask, decode):
    """Texts of the runs of trained tokens."""
    runs, position = [], 0
    for trained, run in groupby((mask != 0).tolist()):
        length = len(list(run))
        if trained:
            runs.append(decode(ids[position : position + length].tolist()))
        position += length
    return runs


def wanted_answers(chat):
    """What the bundled template makes of each assistant message that is trained on, by the book."""
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


def test_traced_and_marked_template_agree(tmp_path):
    assert preprocess(tmp_path / "traced", "--packing", "none").code == 0
    assert preprocess(tmp_path / "marked", "--packing", "none", "--chat-template", GENERATION_TEMPLATE).code == 0
    traced, marked = files_of(tmp_path / "traced"), files_of(tmp_path / "marked")
    assert all(traced[suffix] == marked[suffix] for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx"))


def test_same_bytes_for_any_number_of_workers(tmp_path, chats):
    many = chats * 25  # several pieces of a megabyte
    for workers in (0, 1, 3):
        assert preprocess(tmp_path / f"w{workers}" / "x", "--workers", workers, rows=many).code == 0
    assert files_of(tmp_path / "w0" / "x") == files_of(tmp_path / "w1" / "x") == files_of(tmp_path / "w3" / "x")


def test_packing_moves_whole_sequences_and_changes_no_token(tmp_path):
    assert preprocess(tmp_path / "each", "--packing", "none").code == 0
    for method in (
        "auto",
        "best-fit",
        "exact-fill",
        "first-fit-shuffle",
        "first-fit-decreasing",
        "sequential",
    ):
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


def test_append_eod_is_trained_exactly_when_the_token_before_it_is(tmp_path, tokenizer):
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
    assert (third[-1], three[-1]) == (eod, 0)  # the newline after the turn is not trained on


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


LONG = [
    {"prompt": "Count.", "completion": " ".join(map(str, range(400)))},
    {"prompt": "Hi", "completion": "Hello"},
]


def test_overlong_is_an_error_that_keeps_the_corpus_for_the_next_run(tmp_path):
    failed = preprocess(tmp_path / "x", rows=LONG, capacity=256)
    assert failed.code == 1
    assert "1 of 2 sequences are longer than 256 tokens, the longest has" in failed.err
    assert "--overlong drop, truncate or split" in failed.err
    assert remains(tmp_path) == sorted(f"x.unpacked{s}" for s in (".bin", ".idx", ".loss.bin", ".seq.bin", ".seq.idx"))
    again = preprocess(tmp_path / "x", "--overlong", "split", rows=LONG, capacity=256)
    assert again.code == 0, again
    assert "corpus reused" in again.out
    assert not list(tmp_path.glob("x.unpacked*"))


def test_a_corpus_of_other_input_is_not_reused(tmp_path):
    assert preprocess(tmp_path / "x", rows=LONG, capacity=256).code == 1
    other = preprocess(tmp_path / "x", "--overlong", "drop", rows=LONG[::-1], capacity=256)
    assert other.code == 1
    assert "made with another input" in other.err
    other = preprocess(tmp_path / "x", "--overlong", "drop", "--append-eod", rows=LONG, capacity=256)
    assert other.code == 1
    assert "made with another options" in other.err
    assert preprocess(tmp_path / "x", "--overlong", "drop", "--overwrite", rows=LONG[::-1], capacity=256).code == 0


@pytest.mark.parametrize("multiple", [1, 16])
def test_overlong_drop_truncate_split(tmp_path, multiple):
    assert preprocess(tmp_path / "whole", "--packing", "none", rows=LONG, capacity=4096).code == 0
    (long, long_mask), (short, short_mask) = sequences_of(tmp_path / "whole")

    def run(overlong):
        done = preprocess(
            tmp_path / overlong, "--overlong", overlong, "--packing", "sequential", "--sequence-multiple", multiple,
            "--summary", tmp_path / "s.json", rows=LONG, capacity=250,
        )  # fmt: skip
        assert done.code == 0, done
        return sequences_of(tmp_path / overlong), json.loads((tmp_path / "s.json").read_text())["packing"]

    limit = 250 // multiple * multiple
    dropped, counts = run("drop")
    assert [ids.tolist() for ids, _ in dropped] == [short.tolist()]
    assert (counts["overlong"], counts["dropped_tokens"]) == (1, len(long))

    truncated, counts = run("truncate")
    assert [ids.tolist() for ids, _ in truncated] == [long[:limit].tolist(), short.tolist()]
    assert truncated[0][1].tolist() == long_mask[:limit].tolist()
    assert (counts["overlong"], counts["dropped_tokens"]) == (1, len(long) - limit)
    assert counts["untrained_by_cut"] == int(long_mask[limit] != 0)

    split, counts = run("split")
    assert np.concatenate([ids for ids, _ in split]).tolist() == [*long.tolist(), *short.tolist()]
    cuts = range(limit, len(long), limit)
    expected = long_mask.copy()
    expected[list(cuts)] = 0  # nothing in the same sequence predicts the first token after a cut
    assert np.concatenate([mask for _, mask in split]).tolist() == [*expected.tolist(), *short_mask.tolist()]
    assert (counts["overlong"], counts["dropped_tokens"]) == (1, 0)
    assert counts["untrained_by_cut"] == sum(int(long_mask[cut] != 0) for cut in cuts)


def test_pack_repacks_packs_without_tokens_lost(tmp_path):
    assert preprocess(tmp_path / "x", "--keep-corpus").code == 0
    for source in ("x", "x.unpacked"):
        done = command("pack", tmp_path / source, "--seq-length", 2048, "--output-prefix", tmp_path / f"{source}-2k")
        assert done.code == 0, done
        assert "rows" not in done.out
    whole = sorted((ids.tobytes(), mask.tobytes()) for ids, mask in sequences_of(tmp_path / "x.unpacked"))
    for prefix in ("x", "x-2k", "x.unpacked-2k"):
        assert sorted((a.tobytes(), m.tobytes()) for a, m in sequences_of(tmp_path / prefix)) == whole
    assert len(Shard(tmp_path / "x-2k")) < len(Shard(tmp_path / "x"))
    # The corpus packed now is the shard that preprocess made then.
    assert command("pack", tmp_path / "x.unpacked", "--seq-length", 1024, "--output-prefix", tmp_path / "y").code == 0
    assert files_of(tmp_path / "x") == files_of(tmp_path / "y")


def test_refuses_to_overwrite(tmp_path):
    assert preprocess(tmp_path / "x").code == 0
    before = files_of(tmp_path / "x")
    refused = preprocess(tmp_path / "x", "--seed", 5)
    assert refused.code == 1
    assert "exist already" in refused.err
    assert files_of(tmp_path / "x") == before
    assert preprocess(tmp_path / "x", "--seed", 5, "--overwrite").code == 0
    assert files_of(tmp_path / "x") != before


def test_dry_run_shows_and_writes_nothing(tmp_path):
    done = preprocess(tmp_path / "new" / "x", "--dry-run")
    assert done.code == 0, done
    assert "[[" in done.out
    assert "nothing was written" in done.out
    assert not (tmp_path / "new").exists()


def test_bad_rows_can_be_skipped_and_are_listed(tmp_path, chats):
    rows = [
        chats[0],
        {"messages": []},
        chats[1],
        {"text": "?"},
        {"input_ids": [1, 10**6], "loss_mask": [1, 1]},
    ]
    done = preprocess(tmp_path / "x", "--on-bad-row", "skip", "--summary", tmp_path / "s.json", rows=rows)
    assert done.code == 0, done
    listed = json.loads((tmp_path / "s.json").read_text())["corpus"]["bad_rows"]
    assert [line.split(":")[1] for line in listed] == ["2", "4", "5"]
    assert [line.split("rows.jsonl:")[1][0] for line in done.err.splitlines()] == ["2", "4", "5"]
    assert len(sequences_of(tmp_path / "x")) == 2
    assert Shard(tmp_path / "x").header.metadata["sources"]["skipped"] == 3


def test_progress_is_plain_lines_without_a_terminal(tmp_path, chats):
    done = preprocess(tmp_path / "x", "--log-interval", 1000, rows=chats * 25)
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if line.startswith("tokenising: ")]
    assert len(lines) >= 3
    assert all(" rows/s" in line and " left" in line for line in lines)
    assert "100.0%" in lines[-1]
    assert "\r" not in done.err


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_runs_leave_nothing(tmp_path, chats, sent, code):
    source = write_rows(tmp_path / "rows.jsonl", chats * 80)
    arguments = ["preprocess", "--input", source, "--tokenizer-model", TOKENIZER, "--seq-length", "1024"]
    arguments += ["--output-prefix", tmp_path / "x", "--workers", "2", "--log-interval", "1000"]
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_sft_idx", *map(str, arguments)],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("tokenising: "), first
        assert (tmp_path / "x.unpacked.journal").exists()
        os.killpg(process.pid, sent)
        rest = process.stderr.read()
    assert process.returncode == code, rest
    assert "Traceback" not in rest
    assert remains(tmp_path) == []


def test_a_killed_worker_changes_no_byte(tmp_path, chats):
    source = write_rows(tmp_path / "rows.jsonl", chats * 60)
    arguments = ["preprocess", "--input", source, "--tokenizer-model", TOKENIZER, "--seq-length", "1024"]
    assert command(*arguments, "--output-prefix", tmp_path / "calm", "--workers", 0).code == 0
    arguments += ["--output-prefix", tmp_path / "shot", "--workers", "2", "--log-interval", "1000"]
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_sft_idx", *map(str, arguments)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("tokenising: ")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        worker = next(pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(worker), signal.SIGKILL)
        rest = process.stderr.read()
    assert process.returncode == 0, rest
    assert files_of(tmp_path / "shot") == files_of(tmp_path / "calm")
