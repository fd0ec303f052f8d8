"""Chats to ids and masks, compared with transformers: ``python tools/bench/tokenising.py``.

Every contestant runs in a separate process, warms up on some chats and is timed on others; rounds take
turns, and the table holds medians. All of them must give the same ids and masks, which is checked. Chats and
tokenizer are made on the spot from a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import xxhash
from measure import in_own_process
from plot import Dot, dots
from report import Bench, run_bench

from megatron_sft_idx.chat.template import ChatTemplate
from megatron_sft_idx.chat.tokenizer import load_tokenizer
from megatron_sft_idx.chat.types import Conversation, Rendered, Span

BATCH = 100
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {
    "en": "the of and to in is that it for you with on as are this be or have from can how what please show",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch über größer",
    "ru": "и в не на я что он с как это все она так его но да ты к у же вы за бы по только мне было вот",
    "zh": "的 一 是 不 了 人 我 在 有 他 这 中 大 来 上 国 和 说 们 为 你 时间 问题 可以 我们 学习 数据",
    "ar": "في من على أن إلى هذا التي ما كان لا مع هو عن قد كل هذه بعد ذلك أو بين غير حتى إذا كما",
    "code": "def return for in range( len( self. import if else: None True x = [ ] { } i += 1 print( \n \t",
}
SYLLABLES = "ba|de|ki|lo|mu|ra|se|ti|no|va|zen|tor|mil|pre|con|ing|ation|er|al|ist|un|gra|fel|dor"


# ---- the chats ----


def make_chats(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Chats in several languages and code; a third of the words are rare, drawn from 30,000 made-up ones."""
    rng = random.Random(seed)
    rare = ["".join(rng.choices(SYLLABLES.split("|"), k=rng.randrange(2, 5))) for _ in range(30_000)]
    common = {name: words.split(" ") for name, words in WORDS.items()}

    def text(words: int) -> str:
        pool = common[rng.choices(list(common), [8, 2, 1, 2, 1, 3])[0]]
        parts = [rng.choice(rare) if rng.random() < 0.3 else rng.choice(pool) for _ in range(words)]
        for at in range(rng.randrange(3, 9), words, 11):
            parts[at] = str(rng.randrange(10**4)) + rng.choice([".", ",\n", ":", "!", " 😀"])
        return " ".join(parts)

    def sized(words: int) -> str:
        return "\n\n".join(text(min(words, 60)) for _ in range(1 + words // 60))

    chats = []
    for _ in range(count):
        chat = [{"role": "system", "content": sized(30)}] if rng.random() < 0.3 else []
        for _ in range(rng.randrange(1, 5)):
            chat.append({"role": "user", "content": sized(rng.randrange(5, 60))})
            chat.append({"role": "assistant", "content": sized(rng.randrange(10, 250))})
        chats.append(chat)
    return chats


def train_tokenizer(folder: Path, chats: list[list[dict[str, str]]]) -> None:
    """A byte-level BPE of 16,000 tokens, split as Qwen's."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([turn["content"] for chat in chats for turn in chat], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_input(folder: Path, count: int, *, seed: int) -> None:
    """``chats.jsonl``, and a tokenizer that carries the template."""
    chats = make_chats(count, seed)
    (folder / "tokenizer").mkdir()
    train_tokenizer(folder / "tokenizer", chats[: min(count, 3000) // 3])
    config = folder / "tokenizer/tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats)


# ---- the contestants: each gives, for chats, rows of (ids, mask) ----

Rows = list[tuple[Any, Any]]
Contestant = Callable[[list[Any]], Rows]


def in_batches(chats: list[Any], work: Callable[[list[Any]], Rows]) -> Rows:
    return [row for at in range(0, len(chats), BATCH) for row in work(chats[at : at + BATCH])]


def transformers_masks(folder: str) -> Contestant:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def work(chats: list[Any]) -> Rows:
        out = tokenizer.apply_chat_template(
            chats, chat_template=TEMPLATE, return_assistant_tokens_mask=True, return_dict=True
        )
        return list(zip(out["input_ids"], out["assistant_masks"], strict=True))

    return lambda chats: in_batches(chats, work)


def _tokenizer(folder: str, backend: str) -> Any:
    """Read by this library, and by no other instead."""
    tokenizer = load_tokenizer(folder, backend="tokenizers" if backend == "tokenizers" else "auto")
    assert tokenizer.backend == backend, f"{tokenizer.backend} reads {folder}"
    return tokenizer


def ours(folder: str, backend: str) -> Contestant:
    tokenizer = _tokenizer(folder, backend)
    template = ChatTemplate(TEMPLATE, special_tokens=tokenizer.special_tokens, control_tokens=tokenizer.control_tokens)

    def work(chats: list[Any]) -> Rows:
        rendered = [template.render(Conversation(chat, [1.0] * len(chat))) for chat in chats]
        return [(row.input_ids, row.loss_mask) for row in tokenizer.encode(rendered)]

    return lambda chats: in_batches(chats, work)


def ours_rendered(folder: str, backend: str) -> Contestant:
    tokenizer = _tokenizer(folder, backend)
    return lambda rows: in_batches(rows, lambda b: [(e.input_ids, e.loss_mask) for e in tokenizer.encode(b)])


def library_only(folder: str) -> Contestant:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

    def work(rows: list[Any]) -> Rows:
        found = tokenizer.encode_batch([row.text for row in rows], add_special_tokens=False)
        return [(encoding.ids, None) for encoding in found]

    return lambda rows: in_batches(rows, work)


def rendering_only(chats: list[Any]) -> list[Rendered]:
    """As transformers renders, all chats at once."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    texts, ranges = render(
        conversations=chats, chat_template=TEMPLATE, return_assistant_tokens_mask=True, eos_token="<|im_end|>"
    )
    return [Rendered(text, [Span(*span) for span in spans]) for text, spans in zip(texts, ranges, strict=True)]


# Name: what makes it, whether chats come rendered, whether it may use all cores.
CONTESTANTS: dict[str, tuple[Callable[[str], Contestant], bool, bool]] = {
    "transformers `apply_chat_template`, all cores": (transformers_masks, False, True),
    "transformers `apply_chat_template`, one thread": (transformers_masks, False, False),
    "ours, gigatoken": (lambda folder: ours(folder, "gigatoken"), False, False),
    "ours, tokenizers": (lambda folder: ours(folder, "tokenizers"), False, False),
    "ours without rendering, gigatoken": (lambda folder: ours_rendered(folder, "gigatoken"), True, False),
    "ours without rendering, tokenizers": (lambda folder: ours_rendered(folder, "tokenizers"), True, False),
    "`tokenizers.encode_batch` alone, one thread, no masks": (library_only, True, False),
}
RIVALS = list(CONTESTANTS)[:2]
OURS = list(CONTESTANTS)[2:4]


def work(name: str, folder: str, warm: list[Any], timed: list[Any]) -> tuple[float, int, str, str | None]:
    """Run in a separate process: return seconds, tokens, and the hashes of one contestant's ids and masks."""
    make, rendered, every_core = CONTESTANTS[name]
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if every_core else "false"
    contestant = make(folder)
    if rendered:
        warm, timed = rendering_only(warm), rendering_only(timed)
    contestant(warm)
    begin = time.perf_counter()
    rows = contestant(timed)
    seconds = time.perf_counter() - begin
    ids, masks = xxhash.xxh3_128(), xxhash.xxh3_128()
    for row_ids, mask in rows:
        ids.update(np.asarray(row_ids, np.int32).tobytes())
        masks.update(b"" if mask is None else np.asarray(mask, np.uint8).tobytes())
    return seconds, sum(len(one) for one, _ in rows), ids.hexdigest(), None if rows[0][1] is None else masks.hexdigest()


# ---- the table ----


def tables(bench: Bench, times: dict[str, list[float]], tokens: int) -> None:
    rates = {name: [tokens / 1e3 / seconds for seconds in every] for name, every in times.items()}
    best = min(median(times[name]) for name in RIVALS)
    rows = [
        (name, f"{median(every):.3f}", f"{median(rates[name]):,.0f} k", f"{best / median(every):.2f}")
        for name, every in times.items()
    ]
    bench.table(("way", "seconds", "tokens/s", "times the faster transformers run"), rows)
    for way, short in (("gigatoken", True), ("tokenizers", False)):
        for rival, cores in zip(RIVALS, ("all cores", "one thread"), strict=True):
            key, what = f"{way}-{cores.split()[0]}", f"chats to ids and masks, identical output, with {way}"
            peer = f"transformers' batched `apply_chat_template`, {cores}"
            mine, theirs, quoted = rates[OURS[way == "tokenizers"]], rates[rival], short and rival == RIVALS[0]
            bench.headline(key, what, mine, "k tokens/s", peer=peer, theirs=theirs, more=True, short=quoted)
    marks = [Dot(name, every, name.startswith("ours")) for name, every in rates.items()]
    bench.plot("tokenising", dots("Chats to ids and masks", "thousand tokens a second", marks, more=True))


def measure(options: argparse.Namespace, chats: list[Any]) -> tuple[dict[str, list[float]], int]:
    """Seconds of every contestant, and tokens; SystemExit where one gives other ids or masks."""
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(Path(folder), chats[: len(chats) // 3])
        warm, rest = chats[: len(chats) // 5], chats[len(chats) // 5 :]
        times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        tokens, seen_ids, seen_masks = 0, set(), set()
        for _ in range(options.rounds):
            for name, every in times.items():
                seconds, tokens, ids, masks = in_own_process(work, name, folder, warm, rest)
                every.append(seconds)
                seen_ids.add(ids)
                seen_masks.add(masks)
    if len(seen_ids) != 1 or len(seen_masks - {None}) != 1:
        raise SystemExit("ids or masks differ between contestants; no table written")
    return times, tokens


def report(bench: Bench, _: Path, options: argparse.Namespace) -> None:
    chats = make_chats(options.count, seed=0)
    random.Random(0).shuffle(chats)
    times, tokens = measure(options, chats)
    bench.say(
        f"{len(chats) - len(chats) // 5:,} chats (generated), {tokens:,} tokens; one process each, batches of {BATCH}"
        " chats, medians of fresh processes warmed up on other chats. Ids and masks are identical."
    )
    tables(bench, times, tokens)


if __name__ == "__main__":
    title, peers = "Tokenising and masking chats, beside transformers", ("transformers", "tokenizers", "gigatoken")
    run_bench(title, peers, report, {"count": (3000, 10_000, "chats to make")}, rounds=(3, 7))
