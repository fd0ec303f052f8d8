"""A survey for people, as lines, and for programs, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_sft_idx.inspect.survey import Survey
from megatron_sft_idx.inspect.tally import Tally
from megatron_sft_idx.inspect.text import shortened
from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.files import DATA_SUFFIXES
from megatron_sft_idx.shard.fingerprints import source_of, template_of, tokenizer_of

__all__ = ["file_nbytes", "fingerprints", "losses", "summary_dict", "summary_lines"]

_LOSSES = {
    "overlong_sequences": "overlong sequences",
    "dropped_tokens": "dropped tokens",
    "untrained_by_cut": "labels lost to cuts",
}


def fingerprints(header: Header) -> dict[str, str]:
    """What a shard was made from, by name; what it does not say is left out."""
    found = {
        "shard": header.shard_id.hex(),
        "tokenizer": tokenizer_of(header),
        "chat template": template_of(header),
        "source": source_of(header),
    }
    return {name: value for name, value in found.items() if value is not None}


def losses(header: Header) -> dict[str, int]:
    """Counts in the metadata of what did not come through: rows skipped, sequences too long, tokens dropped."""
    found: dict[str, Any] = {}
    sources, packing = header.metadata.get("sources"), header.metadata.get("packing")
    if isinstance(sources, dict):
        found["rows skipped"] = sources.get("skipped")
    if isinstance(packing, dict):
        found |= {name: packing.get(key) for key, name in _LOSSES.items()}
    # Anybody may write anything into the metadata.
    return {name: value for name, value in found.items() if type(value) is int and 0 <= value < 2**63}


def file_nbytes(header: Header) -> dict[str, int]:
    """Size of each of the five files by suffix."""
    sizes = {suffix: digest.nbytes for suffix, digest in zip(DATA_SUFFIXES, header.digests, strict=True)}
    return sizes | {".seq.idx": header.seq_idx_nbytes}


def summary_lines(prefix: str, survey: Survey) -> list[str]:
    """As a person reads it."""
    header = survey.header
    if not header.num_packs:
        return [f"{prefix}: an empty shard: no packs", *_table(_kept(header)), "", *_table(_provenance(header))]
    return [
        f"{prefix}",
        *_table(_facts(survey)),
        "",
        f"{'':22}{'min':>10}{'5%':>10}{'median':>10}{'95%':>10}{'max':>10}{'mean':>12}",
        _row("sequence length", survey.sequence_lengths),
        _row("pack length", survey.pack_lengths),
        _row("sequences a pack", survey.sequences),
        _row("trained %", survey.trained, 0.1),
        "",
        *_odd_lines(survey),
        *_table(_provenance(header)),
    ]


def _facts(survey: Survey) -> Iterator[tuple[str, str]]:
    header = survey.header
    masked = f" ({header.num_masked_packs:,} all masked)" if header.num_masked_packs else ""
    yield "packs", f"{header.num_packs:,}{masked}"
    yield "sequences", f"{header.num_sequences:,}"
    yield "tokens", f"{header.num_tokens:,} ({header.token_dtype.name})"
    share = 100 * header.num_trained_tokens / header.num_tokens
    yield "trained tokens", f"{header.num_trained_tokens:,} ({share:.1f}%; masks {header.mask_dtype.name})"
    yield "fill", f"{100 * survey.fill:.2f}%"
    yield "attention", f"the costliest pack costs {survey.cost_spread:.2f} times the mean"
    yield from _kept(header)
    if not survey.complete:
        yield "sampled", f"masks and ids of {survey.read_packs:,} packs, evenly spread; all else is of all packs"


def _kept(header: Header) -> Iterator[tuple[str, str]]:
    yield "capacity", f"{header.capacity:,}, sequence multiple {header.sequence_multiple}"
    for name, count in losses(header).items():
        yield name, f"{count:,}"
    sizes = file_nbytes(header)
    yield "on disk", f"{sum(sizes.values()):,} bytes: " + ", ".join(f"{k} {v:,}" for k, v in sizes.items())


def _provenance(header: Header) -> Iterator[tuple[str, str]]:
    for name, value in fingerprints(header).items():
        yield f"{name} id" if name == "shard" else name, shortened(value, 200)
    if header.rebuilt:
        yield "rebuilt", "the header was derived from the data; what only it knew is lost"


def _table(rows: Iterator[tuple[str, str]]) -> list[str]:
    found = list(rows)
    return [f"{name:22}{value}" for name, value in found]


def _row(name: str, tally: Tally, scale: float = 1) -> str:
    def shown(value: float) -> str:
        return f"{value:,.1f}" if scale != 1 else f"{value:,.0f}"

    values = [tally.least, *(tally.quantile(share) for share in (0.05, 0.5, 0.95)), tally.largest]
    return f"{name:22}" + "".join(f"{shown(value * scale):>10}" for value in values) + f"{tally.mean * scale:>12,.1f}"


def _odd_lines(survey: Survey) -> Iterator[str]:
    for odd in survey.odd:
        sampled = "" if odd.exact else " among those sampled"
        places = [f"{place.name} ({place.note})" for place in odd.places]
        if shown := [*([odd.counted + sampled] if odd.count else []), *places]:
            yield f"{odd.kind.lower():22}{shown[0]}"
            yield from (f"{'':22}{line}" for line in shown[1:])
    yield ""


def summary_dict(prefix: str, survey: Survey) -> dict[str, Any]:
    """As plain values."""
    header = survey.header
    return {
        "prefix": prefix,
        "packs": header.num_packs,
        "sequences": header.num_sequences,
        "tokens": header.num_tokens,
        "trained_tokens": header.num_trained_tokens,
        "masked_packs": header.num_masked_packs,
        "capacity": header.capacity,
        "sequence_multiple": header.sequence_multiple,
        "fill": round(survey.fill, 6),
        "token_dtype": header.token_dtype.name,
        "mask_dtype": header.mask_dtype.name,
        "sequence_length": survey.sequence_lengths.describe(),
        "pack_length": survey.pack_lengths.describe(),
        "sequences_per_pack": survey.sequences.describe(),
        "trained_permille_of_a_pack": survey.trained.describe(),
        "costliest_pack_over_mean": round(survey.cost_spread, 4),
        "packs_read": survey.read_packs,
        "losses": losses(header),
        "odd": [
            {
                "kind": odd.kind,
                "count": odd.count,
                "exact": odd.exact,
                "places": [place._asdict() for place in odd.places],
            }
            for odd in survey.odd
        ],
        "fingerprints": fingerprints(header),
        "rebuilt": header.rebuilt,
        "nbytes": file_nbytes(header),
        "metadata": header.metadata,
    }
