"""Files in a building folder: ``build.json``, ``done.json`` and the log of packs are read exactly, or rejected.

The input is these three files. Reading them must not change anything.
"""

from __future__ import annotations

import io
from typing import Any

from fuzz.contract import put_files, refused, scratch
from fuzz.fuzz_rebuild import contents
from fuzz.pieces import split
from fuzz.repair import repair_json, repair_log

from megatron_sft_idx.shard import find_remains
from megatron_sft_idx.shard.build_options import BuildOptions
from megatron_sft_idx.shard.pack_log import append_packs, read_blocks
from megatron_sft_idx.storage.building import Building
from megatron_sft_idx.storage.building_files import lost_files, read_done


class _Log(io.BytesIO):
    """A replacement for an ``OutputFile``."""


def run(data: bytes) -> None:
    folder = scratch("building")
    prefix = str(folder / "x")
    build, done, log = split(data, 3)
    for raw in (log, repair_log(log)):
        again: Any = _Log()
        for records in read_blocks(io.BytesIO(raw)):
            if not len(records):
                break  # no writer logs an empty block
            append_packs(again, records)
        assert raw.startswith(again.getvalue())
    for files in ((build, done), (repair_json(build), repair_json(done))):
        before = {f"x.building/{name}": raw for name, raw in zip(("build.json", "done.json"), files, strict=True)}
        put_files(folder, before)
        with refused(prefix), Building.take(prefix, create=False, shared=True) as building:
            assert isinstance(building.content, dict)
            with refused(prefix):
                options = BuildOptions.decode(building.content, prefix)
                assert BuildOptions.decode(options.encode(), prefix) == options
        with refused(prefix):
            found = read_done(prefix)
            assert [*found.files, *found.replaces] == [
                name for name in (*found.files, *found.replaces) if "/" not in name
            ]
            assert {path.removeprefix(f"{prefix}.building/") for path in lost_files(prefix)} <= {*found.files}
        with refused(prefix):
            find_remains(prefix)
        assert contents(folder) == before
