"""Run ``preprocess`` and kill it, and check what is left. Runs in forks of one process, to be quick."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from chats import CHATS, MADE, Outcome, files_of, preprocess, remains, write_rows
from sample_packs import opens

from megatron_sft_idx.produce import production
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.tokenize import EncodingOptions, RowEncoder, cut, parts, pipeline

PIECE_NBYTES = 1500


def be_quick(patch: pytest.MonkeyPatch) -> None:
    """Use many small pieces, and load the tokenizer once, so that forks inherit it."""
    encoders: dict[str, RowEncoder] = {}

    def encoder(options: EncodingOptions) -> RowEncoder:
        if (key := repr(options)) not in encoders:
            encoders[key] = RowEncoder(options)
        return encoders[key]

    patch.setattr(cut, "PIECE_NBYTES", PIECE_NBYTES)
    patch.setattr(pipeline, "RowEncoder", encoder)
    patch.setattr(parts, "RowEncoder", encoder)
    patch.setattr(production, "RowEncoder", encoder)
    patch.setenv("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork


def some_rows(count: int) -> list[Any]:
    """Return chats with bad rows, trained first tokens, and a loss weight in the middle."""
    chats = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    ask, answer = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes.", "weight": 0.5}
    bad, tokenized = {"messages": []}, {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}
    third = count // 3
    return [
        *chats[:third], bad, tokenized,
        *chats[third : 2 * third], {"messages": [ask, answer]},
        *chats[2 * third : count], bad,
    ]  # fmt: skip


class Case:
    """One input, and the result of an uninterrupted run.

    Attributes:
        files: the bytes of the packed shard.
        counts: its summary, without seconds.
        corpus: the ids of each sequence of the tokenised corpus.
        largest_part: size in bytes of the largest part, if it is made in this process.
        seconds: duration of a run.
    """

    def __init__(self, folder: Path, rows: Any, *options: object) -> None:
        self.folder = folder
        self.options = ("--input", write_rows(folder / "rows.jsonl", rows), "--on-bad-row", "skip", *options)
        calm = folder / "calm" / "x"
        sizes = [0]
        with pytest.MonkeyPatch.context() as patch:
            write_part = parts.write_part

            def sized(path: str, *arguments: Any) -> Any:
                info = write_part(path, *arguments)
                sizes.append(Path(path).stat().st_size)
                return info

            patch.setattr(parts, "write_part", sized)
            assert self.run(calm, "--keep-corpus").code == 0
        self.largest_part = max(sizes)
        self.files, self.counts = files_of(calm), self.counts_of(calm)
        corpus = Shard(f"{calm}.unpacked")
        self.corpus = [corpus[i]["input_ids"].tolist() for i in range(len(corpus))]
        begin = time.monotonic()
        assert self.run(calm, "--overwrite").code == 0
        self.seconds = time.monotonic() - begin

    def run(self, prefix: Path, *more: object) -> Outcome:
        prefix.parent.mkdir(exist_ok=True)
        return preprocess(prefix, *self.options, "--summary", self._summary(prefix), *more)

    def _summary(self, prefix: Path) -> Path:
        return self.folder / f"{prefix.parent.name}-{prefix.name}.json"

    def counts_of(self, prefix: Path) -> dict[str, Any]:
        summary = json.loads(self._summary(prefix).read_text())
        return {name: summary[name] for name in ("corpus", "packing")}

    def check_what_is_left(self, prefix: Path) -> None:
        """Check that the shard is complete or missing, and that parts with their final names are correct."""
        if opens(prefix):
            assert files_of(prefix) == self.files
        for path in sorted(Path(f"{prefix}.building/parts").glob("*.part")):
            part = parts.Part(str(path), verify=True)
            ends = part.starts + part.lengths
            found = [part.ids[a:b].tolist() for a, b in zip(part.starts.tolist(), ends.tolist(), strict=True)]
            places = range(len(self.corpus) - len(found) + 1)
            assert any(self.corpus[at : at + len(found)] == found for at in places), f"{path} is no part of the corpus"

    def assert_ends_the_same(self, prefix: Path, *more: object) -> None:
        resumed = self.run(prefix, *more)
        assert resumed.code == 0, resumed
        assert files_of(prefix) == self.files
        assert remains(prefix.parent) == sorted(f"x{suffix}" for suffix in MADE)
        counts = self.counts_of(prefix)
        if counts["corpus"]["reused"]:
            # The corpus was finished; its header has numbers only, and names no row.
            rows = {name: self.counts["corpus"][name] for name in ("bad_rows", "first_rows")}
            counts["corpus"] |= {"reused": False, **rows}
        assert counts == self.counts
