"""The command ``inspect``: its output for people and for programs."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import CHATS, ROOT, TOKENIZER, command, files_of, preprocess
from object_folders import serve_folder
from sample_packs import demo_samples, sample_of, write_samples
from tokenizers import Tokenizer

from megatron_sft_idx.cli.main import main
from megatron_sft_idx.inspect.text import find_text
from megatron_sft_idx.shard import Shard

TEXT = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("inspect") / "chats"
    assert preprocess(prefix).code == 0
    return prefix


def ids_of(text: str) -> list[int]:
    ids: list[int] = TEXT.encode(text, add_special_tokens=False).ids
    return ids


def write_texts(prefix: Path, packs: list[list[str]], **options: Any) -> None:
    """Write packs of these texts as sequences. The second half of each is trained."""
    samples = []
    for texts in packs:
        ids = [ids_of(text) for text in texts]
        flat = [number for some in ids for number in some]
        mask = [int(2 * k >= len(some)) for some in ids for k in range(len(some))]
        samples.append(sample_of([*map(len, ids)], mask.__getitem__, flat.__getitem__))
    write_samples(prefix, samples, capacity=4096, **options)


def test_the_summary_says_what_the_header_and_the_data_hold(chats: Path) -> None:
    outcome = command("inspect", chats)
    header = Shard(chats).header
    assert outcome.code == 0
    lines = {line[:22].strip(): line[22:] for line in outcome.out.splitlines() if line[:22].strip()}
    assert lines["packs"] == f"{header.num_packs}"
    assert lines["trained tokens"].startswith(f"{header.num_trained_tokens:,} (")
    assert lines["capacity"] == "1,024, sequence multiple 1"
    assert lines["dropped tokens"] == "0"
    assert lines["tokenizer"] == header.metadata["tokenizer"]["fingerprint"]
    size = sum(len(raw) for raw in files_of(chats).values())
    assert lines["on disk"].startswith(f"{size:,} bytes: .bin ")
    assert "sampled" not in outcome.out


def test_the_summary_as_json(chats: Path) -> None:
    found = json.loads(command("inspect", chats, "--json").out)
    shard = Shard(chats)
    lengths = [len(ids) for i in range(len(shard)) for ids, _ in shard.sequences(i)]
    assert found["sequence_length"]["max"] == max(lengths)
    assert found["sequence_length"]["mean"] == pytest.approx(np.mean(lengths), abs=1e-3)
    assert found["packs"] == len(shard)
    assert found["metadata"] == shard.header.metadata
    assert {one["kind"] for one in found["odd"]} >= {"All masked", "Repeated sequences"}


def test_a_pack_as_text_and_as_ids(chats: Path) -> None:
    text = command("inspect", chats, "--pack", 3, "--tokenizer", TOKENIZER)
    assert text.code == 0
    assert re.match(r"── sequence 0 \(chats\.jsonl:\d+\), positions 0 to ", text.out)
    assert "<|im_start|>assistant\n[[" in text.out
    pack = Shard(chats)[3]
    ids = command("inspect", chats, "--pack", 3).out
    numbers = "".join(line for line in ids.splitlines() if not line.startswith("──"))
    assert [int(word) for word in numbers.replace("[[", " ").replace("]]", " ").split()] == pack["input_ids"].tolist()


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("term", "no_color", "colored"), [("xterm", "", True), ("xterm", "1", False), ("dumb", "", False)]
)
def test_color_is_for_terminals_that_have_it(
    chats: Path, term: str, no_color: str, colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    with contextlib.redirect_stdout(Terminal()) as out:
        assert main(["inspect", str(chats), "--pack", "0"]) == 0
        inputs = ["--input", str(CHATS), "--tokenizer", str(TOKENIZER), "--seq-length", "1024", "--output-prefix", "x"]
        assert main(["preprocess", *inputs, "--earlier-reasoning", "drop", "--dry-run"]) == 0
    assert ("\x1b[" in out.getvalue(), "[[" in out.getvalue()) == (colored, not colored)


def test_found_text_never_looks_like_trained_text(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with contextlib.redirect_stdout(Terminal()) as out:
        assert main(["inspect", str(chats), "--tokenizer", str(TOKENIZER), "--find", "<|im_end|>", "--limit", "3"]) == 0
    found = re.findall("\x1b\\[30;43m(.*?)\x1b\\[0m", out.getvalue())
    assert found == ["<|im_end|>"] * 3
    assert not re.search(r">>|\[\[|\x1b\[30;42m", out.getvalue())


def test_a_pack_as_json(chats: Path) -> None:
    found = json.loads(command("inspect", chats, "--pack", 0, "--json", "--tokenizer", TOKENIZER).out)
    pairs = Shard(chats).sequences(0)
    assert [one["input_ids"] for one in found["sequences"]] == [ids.tolist() for ids, _ in pairs]
    assert [one["trained"] for one in found["sequences"]] == [[0, *mask[:-1].tolist()] for _, mask in pairs]
    assert all(one["text"] == TEXT.decode(one["input_ids"], skip_special_tokens=False) for one in found["sequences"])


def test_find_names_pack_sequence_and_token(tmp_path: Path) -> None:
    write_texts(tmp_path / "x", [["one needle, two", "nothing"], ["none here nee", "dle but a needle"]])
    outcome = command("inspect", tmp_path / "x", "--find", "needle", "--tokenizer", TOKENIZER)
    assert outcome.code == 0
    first, second = outcome.out.splitlines()
    assert first.startswith("pack 0, sequence 0, token ")
    assert first.endswith(": one >>needle<<, two")
    assert "[[" not in outcome.out  # these are for trained tokens, and half of this hit is trained
    assert second.startswith("pack 1, sequence 1, token ")
    found = json.loads(command("inspect", tmp_path / "x", "--find", "needle", "--tokenizer", TOKENIZER, "--json").out)
    shard = Shard(tmp_path / "x")
    for match in found["matches"]:
        ids, mask = shard.sequences(match["pack"])[match["sequence"]]
        ahead = TEXT.decode(ids[: match["token"]].tolist(), skip_special_tokens=False)
        through = TEXT.decode(ids[: match["token"] + 1].tolist(), skip_special_tokens=False)
        assert len(ahead) <= len(match["before"]) < len(through)
        assert match["trained"] == bool(mask[match["token"] - 1])


def test_find_names_tokens_of_long_sequences(tmp_path: Path) -> None:
    text = "".join(f"{i} 🫖สวัสดี needle𓀀 " for i in range(250))
    write_texts(tmp_path / "x", [["short", text]])
    for looked_for in ("needle", "𓀀", "ดี"):
        found = command(
            "inspect", tmp_path / "x", "--find", looked_for, "--tokenizer", TOKENIZER, "--json", "--limit", 999
        )
        matches = json.loads(found.out)["matches"]
        assert len(matches) == 250
        ids = Shard(tmp_path / "x").sequences(0)[1][0].tolist()
        assert len(ids) > 3000
        at = -1
        for match in matches[::40]:
            at = next(k for k in range(at + 1, len(text)) if text.startswith(f"{match['before']}{looked_for}", k))
            ahead, through = (TEXT.decode(ids[: match["token"] + k], skip_special_tokens=False) for k in (0, 1))
            assert len(ahead.rstrip("\ufffd")) <= at + len(match["before"]) < len(through)


@pytest.mark.parametrize("before", range(9))
@pytest.mark.parametrize("damaged", ["", "\ufffd", "\ufffd\ufffd"])
def test_find_names_the_token_behind_a_character_of_several(tmp_path: Path, before: int, damaged: str) -> None:
    raw = f"{damaged}{'a' * before}🫖{damaged}xy".encode()
    pot = len(damaged.encode()) + before
    x = len(raw) - 2
    write_samples(tmp_path / "x", [sample_of([len(raw)], lambda p: int(p == x), lambda p: raw[p])])

    def by_bytes(ids: list[int]) -> str:  # like SentencePiece: each byte of an incomplete character separately
        return bytes(ids).decode("utf-8", "surrogateescape").translate(dict.fromkeys(range(0xDC80, 0xDD00), 0xFFFD))

    found = {text: next(find_text(Shard(tmp_path / "x"), text, by_bytes)) for text in "🫖xy"}
    assert {text: match.token for text, match in found.items()} == {"🫖": pot, "x": x, "y": x + 1}
    assert [text for text, match in found.items() if match.trained] == ["x"]


@pytest.mark.parametrize("text", ["🫖", "สวัสดี", "𓀀𓀁", "\n"])
def test_find_looks_for_text_not_for_tokens(tmp_path: Path, text: str) -> None:
    write_texts(tmp_path / "x", [["zzz", f"a{text}b{text}"]])
    found = json.loads(command("inspect", tmp_path / "x", "--find", text, "--tokenizer", TOKENIZER, "--json").out)
    assert [(m["before"], m["text"]) for m in found["matches"]] == [("a", text), (f"a{text}b", text)]
    assert command("inspect", tmp_path / "x", "--find", text * 2, "--tokenizer", TOKENIZER).code == 1


def test_find_stops_at_its_limit(tmp_path: Path) -> None:
    write_texts(tmp_path / "x", [["ha ha ha ha"]])
    outcome = command("inspect", tmp_path / "x", "--find", "ha", "--limit", 2, "--tokenizer", TOKENIZER)
    assert [line.split(":")[0] for line in outcome.out.splitlines()][2:] == [
        "stopped after 2 matches; raise --limit to see more"
    ]
    exact = command("inspect", tmp_path / "x", "--find", "ha", "--limit", 4, "--tokenizer", TOKENIZER)
    assert len(exact.out.splitlines()) == 4
    assert "stopped" not in exact.out


def test_another_tokenizer_is_refused(chats: Path, tmp_path: Path) -> None:
    other = json.loads((TOKENIZER / "tokenizer.json").read_text())
    last = max(other["added_tokens"], key=lambda token: token["id"])
    other["added_tokens"].append(last | {"id": TEXT.get_vocab_size(), "content": "<|new|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    outcome = command("inspect", chats, "--pack", 0, "--tokenizer", tmp_path / "tokenizer.json")
    assert outcome.code == 1
    assert Shard(chats).header.metadata["tokenizer"]["fingerprint"] in outcome.err
    assert "leave --tokenizer out" in outcome.err


def test_a_shard_that_names_no_tokenizer_takes_any(tmp_path: Path) -> None:
    write_texts(tmp_path / "x", [["hello"]])
    outcome = command("inspect", tmp_path / "x", "--pack", 0, "--tokenizer", TOKENIZER)
    assert outcome.code == 0
    assert "hel" in outcome.out
    assert "does not record which tokenizer" in outcome.err


def test_what_cannot_be_asked(chats: Path, tmp_path: Path) -> None:
    assert command("inspect", tmp_path / "nothing").code == 1
    assert "needs" not in command("inspect", chats, "--pack", 10_000).err
    assert "no pack 10000; the shard has" in command("inspect", chats, "--pack", 10_000).err
    for arguments in (
        ["--find", "x"],
        ["--find", "", "--tokenizer", TOKENIZER],
        ["--pack", -1],
        ["--html", tmp_path / "x.html", "--json"],
        ["--html", tmp_path / "no/x.html"],
        ["--pack", 0, "--diff", chats],
    ):
        assert command("inspect", chats, *arguments).code == 2


def test_a_page_is_not_overwritten_unasked(chats: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    assert command("inspect", chats, "--html", path).code == 0
    before = path.read_bytes()
    again = command("inspect", chats, "--html", path)
    assert again.code == 1
    assert "--overwrite" in again.err
    outcome = command("inspect", chats, "--html", path, "--overwrite", "--tokenizer", TOKENIZER)
    assert outcome.code == 0
    assert path.read_bytes() != before
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.html"]


def test_each_command_on_the_page_can_be_pasted(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is made with relative paths, and the commands run in another folder."""
    monkeypatch.chdir(chats.parent)
    tokenizer = os.path.relpath(TOKENIZER)
    assert command("inspect", "chats", "--tokenizer", tokenizer, "--html", tmp_path / "text.html").code == 0
    assert command("inspect", "chats", "--html", tmp_path / "ids.html").code == 0
    monkeypatch.chdir(tmp_path)
    for name, shown in (("text", "<|im_start|>assistant"), ("ids", "1 ")):
        page = Path(f"{name}.html").read_text(encoding="utf-8")
        commands = [html.unescape(one) for one in re.findall(r'<code class="command">(.*?)</code>', page)]
        assert {one.split(" --")[-1].split()[0] for one in commands} == {"pack", "row"}
        (searching,) = re.findall('data-command="(.*?)"', page)
        if name == "text":
            commands.append(html.unescape(searching) + " --find='<|im_start|>assistant'")
        else:
            assert searching == ""
        for one in commands:
            program, *arguments = shlex.split(one)
            outcome = command(*arguments)
            assert (program, outcome.code) == ("megatron-sft-idx", 0), outcome.err
            assert "--row" in arguments or shown in outcome.out


def test_an_empty_shard_and_one_that_was_rebuilt(tmp_path: Path) -> None:
    write_samples(tmp_path / "empty", [], capacity=8)
    outcome = command("inspect", tmp_path / "empty")
    assert "empty shard" in outcome.out
    assert f"\nshard id              {Shard(tmp_path / 'empty').shard_id.hex()}\n" in outcome.out
    assert command("inspect", tmp_path / "empty", "--html", tmp_path / "x.html").code == 0
    write_samples(tmp_path / "x", demo_samples())
    Path(tmp_path / "x.seq.idx").unlink()
    assert command("rebuild", tmp_path / "x", "--seq-length", 64).code == 0
    assert "rebuilt" in command("inspect", tmp_path / "x").out


def test_what_was_lost_is_counted(tmp_path: Path) -> None:
    metadata = {
        "sources": {"skipped": 2},
        "packing": {"overlong_sequences": 1234, "dropped_tokens": 56789, "lost_trained_tokens": 7},
    }
    write_samples(tmp_path / "x", [], capacity=8, metadata=metadata)
    out = command("inspect", tmp_path / "x").out
    for line in (
        "rows skipped          2",
        "overlong sequences    1,234",
        "dropped tokens        56,789",
        "trained tokens lost   7",
    ):
        assert f"\n{line}\n" in out


def test_metadata_of_any_kind_is_survived(tmp_path: Path) -> None:
    metadata = {"tokenizer": [1], "chat_template": 7, "sources": "x", "packing": {"dropped_tokens": "many"}}
    write_samples(tmp_path / "x", demo_samples(), metadata=metadata)
    assert command("inspect", tmp_path / "x").code == 0
    assert command("inspect", tmp_path / "x", "--html", tmp_path / "x.html").code == 0
    assert command("inspect", tmp_path / "x", "--diff", tmp_path / "x").code == 0


def test_metadata_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    bad = "\x1b[2J\x07\u202e\u2028\n" + "x" * 10**5
    metadata = {"tokenizer": {"fingerprint": bad}, "sources": {"fingerprint": bad}, bad: {bad: bad}}
    write_samples(tmp_path / "x", demo_samples(), metadata=metadata)
    write_samples(tmp_path / "y", demo_samples())
    for arguments in ([], ["--diff", tmp_path / "y"], ["--pack", 0, "--tokenizer", TOKENIZER]):
        outcome = command("inspect", tmp_path / "x", *arguments)
        said = outcome.out + outcome.err
        assert "␛[2J" in said
        assert not {"\x1b", "\x07", "\u202e", "\u2028"} & set(said)
        assert len(said) < 10_000


def test_the_only_shard_of_a_folder_or_glob_is_taken(chats: Path, tmp_path: Path) -> None:
    wanted = command("inspect", chats).out
    assert command("inspect", chats.parent).out == command("inspect", f"{chats.parent}/ch*").out == wanted
    assert command("inspect", chats, "--diff", f"{chats.parent}/").code == 0
    for name in "abcdefg":
        write_samples(tmp_path / name, demo_samples())
    outcome = command("inspect", tmp_path)
    assert outcome.code == 1
    assert (
        f"{tmp_path}: 7 shards found, but only one can be inspected at a time; pass one of: {tmp_path}/a, "
        in outcome.err
    )
    (tmp_path / "b").mkdir()  # a folder next to the shard with the same name
    assert command("inspect", tmp_path / "b").code == 0


def test_a_remote_shard_is_inspected_like_a_local_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bucket"
    folder.mkdir()
    url = serve_folder(folder, tmp_path / "msc.json", monkeypatch)
    write_samples(folder / "x", demo_samples())
    wanted = command("inspect", folder / "x").out.replace(str(folder / "x"), f"{url}/x")
    for remote in (f"{url}/x", f"{url}/", f"{url}/*"):
        assert command("inspect", remote).out == wanted
    assert command("inspect", folder / "x", "--diff", f"{url}/x").code == 0
    assert command("inspect", f"{url}/x", "--html", tmp_path / "x.html").code == 0


def write_damaged(prefix: Path) -> None:
    """Write a shard with weights that are not numbers."""
    write_samples(prefix, [sample_of([5], lambda p: 0.5, lambda p: p)], mask_dtype=np.float32)
    np.array([0.5, np.nan, np.inf, 0.5, 0], "<f4").tofile(f"{prefix}.loss.bin")


def test_weights_that_are_no_numbers_are_shown_in_valid_json(tmp_path: Path) -> None:
    write_damaged(tmp_path / "x")
    found = json.loads(command("inspect", tmp_path / "x", "--pack", 0, "--json").out, parse_constant=pytest.fail)
    assert found["sequences"][0]["trained"] == [0, 0.5, "nan", "inf", 0.5]
    assert command("inspect", tmp_path / "x", "--diff", tmp_path / "x").code == 0
    assert "xnan" in command("inspect", tmp_path / "x", "--pack", 0).out


def test_a_page_that_does_not_fit_the_disk_leaves_nothing(chats: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        outcome = command("inspect", chats, "--html", tmp_path / "x.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome.code == 1
    assert list(tmp_path.iterdir()) == []


def as_process(chats: Path, *arguments: str, out: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "megatron_sft_idx", "inspect", str(chats), *arguments]
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONUNBUFFERED", "PYTHONUTF8")}
    environment = inherited | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(run, check=False, stdout=out, stderr=subprocess.PIPE, text=True, env=environment, timeout=120)


def test_characters_that_the_terminal_lacks_are_shown_by_number(chats: Path) -> None:
    done = as_process(chats, "--pack", "0", out=subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\\u2500\\u2500 sequence 0 (chats.jsonl:")


def test_output_that_cannot_be_written_is_told_once(chats: Path) -> None:
    with open("/dev/full", "w") as full:
        done = as_process(chats, out=full)
    assert done.returncode == 1
    assert done.stderr == "megatron-sft-idx: error: standard output: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = as_process(chats, out=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_inspecting_imports_neither_torch_nor_megatron(chats: Path) -> None:
    program = (
        "import sys; from megatron_sft_idx.cli.main import main; main(sys.argv[1:]);"
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    run = [sys.executable, "-c", program, "inspect", str(chats), "--tokenizer", str(TOKENIZER)]
    subprocess.run(run, cwd=ROOT, check=True, capture_output=True)


def test_the_script_in_tools_is_the_command(chats: Path) -> None:
    run = [sys.executable, "tools/inspect_sft.py", str(chats)]
    done = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout == command("inspect", chats).out
