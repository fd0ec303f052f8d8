"""Legacy .npy files are read completely and exactly, and can never execute code."""

from __future__ import annotations

import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_packs import Sample, demo_samples, samples, write_samples

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats import pickles
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.formats.npy import read_legacy, recognise
from megatron_sft_idx.packs.run import PackRun

ROOT = Path(__file__).parents[2]


def save(path: Path, rows: Any) -> Path:
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    np.save(path, array, allow_pickle=True)
    return path


def assert_same(packs: PackRun, expected: list[Sample]) -> None:
    assert packs.tokens.tolist() == [token for sample in expected for token in sample.tokens]
    assert packs.loss_mask.tolist() == [value for sample in expected for value in sample.label_mask]
    assert np.diff(packs.token_offsets).tolist() == [len(sample.tokens) for sample in expected]
    assert np.diff(packs.sequence_offsets).tolist() == [len(sample.starts) for sample in expected]
    assert packs.seq_starts.tolist() == [start for sample in expected for start in sample.starts]


@pytest.mark.parametrize("weights", [False, True])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_shard_survives_the_way_through_a_legacy_file(tmp_path: Path, data: st.DataObject, weights: bool) -> None:
    expected = data.draw(samples(weights=weights))
    write_samples(tmp_path / "x", expected, overwrite=True, mask_dtype=np.float32 if weights else np.uint8)
    convert(str(tmp_path / "x"), str(tmp_path / "x.npy"), "npy", ConvertOptions(overwrite=True))
    assert_same(read_legacy(tmp_path / "x.npy"), expected)
    # Other programs read it as before.
    assert len(np.load(tmp_path / "x.npy", allow_pickle=True)) == len(expected)


def objects(values: list[Any]) -> Any:
    """Return an array of these objects; numpy itself would convert them."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def rows_of(expected: list[Sample], make: Any) -> list[dict[str, Any]]:
    return [{"input_ids": make(s.tokens), "loss_mask": make(s.label_mask), "seq_start_id": s.starts} for s in expected]


FORMS = {
    "lists": list,
    "small types": lambda values: np.array(values, np.uint8 if max(values) > 1 else bool) if max(values) else values,
    "int64": np.array,
    "big-endian": lambda values: np.array(values, ">i4"),
    "numpy scalars": lambda values: [np.int32(value) for value in values],
    "objects": lambda values: np.array(values, object),
    "arrays without dimensions": lambda values: objects([np.array(value) for value in values]),
    "reversed view": lambda values: np.array(values[::-1])[::-1],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_form_in_which_packs_were_pickled(tmp_path: Path, form: str, protocol: int) -> None:
    expected = demo_samples()
    array = np.empty(len(expected), dtype=object)
    array[:] = rows_of(expected, FORMS[form])
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": array.shape})
    pickle.dump(array, file, protocol=protocol)
    (tmp_path / "x.npy").write_bytes(file.getvalue())
    assert_same(read_legacy(tmp_path / "x.npy"), expected)


def test_a_mask_at_the_end_of_a_sequence_counts_for_nothing(tmp_path: Path) -> None:
    row = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1], "seq_start_id": [0, 2]}
    assert read_legacy(save(tmp_path / "x.npy", [row])).loss_mask.tolist() == [1, 0, 0]


def test_no_packs_are_packs(tmp_path: Path) -> None:
    assert_same(read_legacy(save(tmp_path / "x.npy", [])), [])
    np.save(tmp_path / "y.npy", [])  # float64 is numpy's default
    assert recognise(str(tmp_path / "y.npy"))
    assert_same(read_legacy(tmp_path / "y.npy"), [])


GOOD = {"input_ids": [1, 2, 3], "loss_mask": [1, 0, 0], "seq_start_id": [0, 1]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1, 2], "found list"),
        ({"input_ids": [1]}, "no loss_mask, seq_start_id"),
        (GOOD | {"input_ids": []}, "0 in input_ids, 3 in loss_mask"),
        (GOOD | {"loss_mask": [1, 0]}, "3 in input_ids, 2 in loss_mask"),
        (GOOD | {"input_ids": [1, 2, 2**31]}, "position 2 has id 2147483648"),
        (GOOD | {"input_ids": [1, -2, 3]}, "position 1 has id -2"),
        (GOOD | {"input_ids": [1.5, 2, 3]}, "input_ids is not a list of numbers"),
        (GOOD | {"input_ids": "abc"}, "input_ids is not a list of numbers"),
        (GOOD | {"input_ids": [[1], [2], [3]]}, "input_ids is not a list of numbers"),
        (GOOD | {"loss_mask": [1, float("nan"), 0]}, "position 1 has loss mask nan"),
        (GOOD | {"loss_mask": [1, -1, 0]}, "position 1 has loss mask -1"),
        (GOOD | {"seq_start_id": []}, "no sequence starts"),
        (GOOD | {"seq_start_id": [1]}, "starts at 1, expected 0"),
        (GOOD | {"seq_start_id": [0, 2, 2]}, "sequence 2 starts at 2, expected a start after 2 .rule P3"),
        (GOOD | {"seq_start_id": [0, 3]}, "sequence 1 starts at 3, but the pack has 3 tokens"),
    ],
)
def test_a_bad_pack_is_named(tmp_path: Path, row: Any, words: str) -> None:
    path = save(tmp_path / "x.npy", [GOOD, row])
    with pytest.raises(SequenceError, match=f"{re.escape(str(path))}:1: .*{words}") as caught:
        read_legacy(path)
    assert caught.value.position == 1


class Attack:
    """An object that calls a function with arguments when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "attack",
    [
        lambda target: Attack(os.mkdir, str(target)),
        lambda target: Attack(eval, f"__import__('os').mkdir({str(target)!r})"),
        lambda target: Attack(exec, f"import os; os.mkdir({str(target)!r})"),
        lambda target: Attack(np.save, str(target) + ".npy", [1]),
        lambda target: Attack(np.lib.format.open_memmap, str(target) + ".npy", "w+", "u1", (8,)),
        lambda target: Attack(np.frombuffer, b"12345678", "O"),
    ],
)
def test_an_attack_is_refused(tmp_path: Path, attack: Any, protocol: int) -> None:
    path = tmp_path / "x.npy"
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    pickle.dump([GOOD | {"input_ids": attack(tmp_path / "made")}], file, protocol=protocol)
    path.write_bytes(file.getvalue())
    with pytest.raises(FormatError, match=r"its pickle calls .*rejected"):
        read_legacy(path)
    assert os.listdir(tmp_path) == ["x.npy"]


def pickled(*opcodes: bytes) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return file.getvalue() + b"\x80\x02" + b"".join(opcodes) + b"."


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a numpy file",
        pickled(b"]")[:-2],
        pickled(b"N"),
        # An array whose state has a false dtype, shape and data.
        pickle.dumps(np.arange(3)),
        pickled(b"cnumpy\nndarray\n", b")R", b"(K\x01K\x07\x85cnumpy\ndtype\n", b"U\x02O8\x85R\x88U\x04abcdtb"),
        pickled(
            b"cnumpy\nndarray\n", b")R", b"(K\x01J\xff\xff\xff\x7f\x85cnumpy\ndtype\n", b"U\x02i4\x85R\x88U\x04abcdtb"
        ),
        pickled(b"cnumpy\ndtype\n", b"U\x02V9\x85R"),
        pickled(b"cnumpy\nndarray\n", b")R", b"K\x05b"),
        pickled(b"cnumpy\ndtype\n", b"U\x02i4\x85R", b"}U\x05_nameU\x02O8sb"),
        # Ten bytes for which an unpickler would allocate 32 GiB.
        pickled(b"Nr\xff\xff\xff\x7f"),
        pickled(b"c_codecs\nencode\n", b"X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R"),
        # An array, and a dtype, whose __init__ was not called.
        *(
            pickled(b"](}(U\x09input_ids", ids, b"U\x09loss_mask](K\x01eU\x0cseq_start_id](K\x00eue")
            for ids in (
                b"cnumpy\nndarray\n)\x81",
                b"cnumpy\nndarray\n)R(K\x01K\x01\x85cnumpy\ndtype\n)\x81\x89U\x01atb",
            )
        ),
    ],
)
def test_damaged_and_lying_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises((FormatError, SequenceError), match=re.escape(str(tmp_path))):
        read_legacy(tmp_path / "x.npy")


def test_a_pickle_changes_nothing_that_it_names(tmp_path: Path) -> None:
    before = dict(pickles._STAND_INS)
    state = b"N}U\x0c__defaults__U\x05utf16\x85s\x86b0"
    (tmp_path / "x.npy").write_bytes(pickled(b"c_codecs\nencode\n", state, b"]"))
    assert_same(read_legacy(tmp_path / "x.npy"), [])
    assert pickles._encode("a") == b"a"
    assert before == pickles._STAND_INS


def test_an_array_of_numbers_is_no_list_of_packs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    with pytest.raises(FormatError, match="an array of int64, expected an array of objects"):
        read_legacy(tmp_path / "x.npy")


FLIPS = """
import resource, sys
import numpy as np
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.npy import read_legacy
# A damaged pickle may ask for any amount of memory.
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
path, rng = sys.argv[1], np.random.default_rng(0)
content = np.fromfile(path, np.uint8)
for _ in range(1000):
    flipped = content.copy()
    flipped[rng.integers(len(content))] = rng.integers(256)
    flipped.tofile(path)
    try:
        read_legacy(path)
    except (FormatError, SequenceError):
        continue
"""


def test_a_flipped_byte_never_does_more_than_fail(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", rows_of(demo_samples(3), np.array))
    run = subprocess.run([sys.executable, "-c", FLIPS, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
