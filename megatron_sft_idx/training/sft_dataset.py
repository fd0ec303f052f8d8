"""``PackedSFTDataset``: packed SFT data for Megatron's dataset builder."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.config import PackedSFTDatasetConfig
from megatron_sft_idx.training.rows import EpochOrder, PackedRows, SingleRows
from megatron_sft_idx.training.sources import PlannedPacks, StoredPacks

__all__ = ["Corpus", "EpochFacts", "PackedSFTDataset", "PackedSFTDatasetConfig"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The shards of one path and what is counted in them when they are split.

    Attributes:
        shards: of the path.
        by_sequence: split by sequence, as they are packed after it; else by pack.
    """

    shards: ShardSet
    by_sequence: bool

    def __len__(self) -> int:
        return self.shards.num_sequences if self.by_sequence else len(self.shards)


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """What one epoch of a data set holds.

    Attributes:
        packs: rows.
        tokens: tokens without padding.
        trained_tokens: tokens that are trained on.
        exact: ``trained_tokens`` is exact; else it is the split's share, by tokens, of what its shards hold.
    """

    packs: int
    tokens: int
    trained_tokens: int
    exact: bool

    def steps(self, global_batch_size: int) -> float:
        """Optimizer steps an epoch takes."""
        return self.packs / global_batch_size


class PackedSFTDataset(MegatronDataset):  # type: ignore[misc]
    """Rows of packed sequences, in an order of its own for every epoch.

    Built by ``BlendedMegatronDatasetBuilder``. Sample i is the same for every ``num_samples``: see
    ``megatron_sft_idx.training.rows``. It pickles as its light ``rows``.

    Args:
        dataset: what ``build_low_level_dataset`` made.
        dataset_path: the path of the blend it was made from.
        indices: the split: consecutive packs, or sequences with index-only packing; None is all of them.
        num_samples: rows to serve, over as many epochs as it takes; None is one epoch.
        index_split: which split it is.
        config: how rows are made.

    Attributes:
        source: of the packs.
        order: of the epochs.

    Raises:
        FormatError: the split is empty or not consecutive.
        SequenceError: with index-only packing, sequences longer than a row.
    """

    def __init__(
        self,
        dataset: Corpus,
        dataset_path: str | None,
        indices: NDArray[np.integer[Any]] | None,
        num_samples: int | None,
        index_split: Split,
        config: PackedSFTDatasetConfig,
    ) -> None:
        first, last = _ends(dataset, dataset_path, indices, index_split)
        # The parent keeps what it is given; a range says the same as gigabytes of consecutive numbers.
        super().__init__(dataset, dataset_path, range(first, last), num_samples, index_split, config)
        self.source: StoredPacks | PlannedPacks
        if dataset.by_sequence:
            if config.plan_cache is None:
                log_single_rank(logger, logging.INFO, "without path_to_cache every process packs for itself")
            plan, cache = config.plan_options, config.plan_cache
            self.source = PlannedPacks(dataset.shards, plan, cache=cache, first=first, last=last)
        else:
            self.source = StoredPacks(dataset.shards, first, last)
        config.allow_sequences(self.source.most_sequences)
        self.order = EpochOrder(self.source.num_packs, config.random_seed, index_split.name, self.source.fingerprint)
        self._rows: PackedRows | None = None
        self._identify()
        self._say()

    def _identify(self) -> None:
        """Put the content into the key of Megatron's caches, which holds the path only."""
        self.unique_identifiers["data"] = self.source.fingerprint
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)
        self.unique_description_hash = hashlib.md5(
            self.unique_description.encode("utf-8"), usedforsecurity=False
        ).hexdigest()

    @staticmethod
    def _key_config_attributes() -> list[str]:
        # Without the tokenizer, which changes nothing here and need not be given.
        return ["random_seed", "sequence_length", "split", "split_matrix", "sequence_multiple", "index_only_packing"]

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: PackedSFTDatasetConfig) -> Corpus:
        """Open the shards of a path: one shard, a folder or a glob."""
        return Corpus(config.open_shards(dataset_path), config.index_only_packing)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Corpus) -> int:
        """What splits divide: packs, or sequences with index-only packing."""
        return len(low_level_dataset)

    def epoch_facts(self) -> EpochFacts:
        """What one epoch holds."""
        shards = self.source.shards
        tokens, everything = self.source.num_tokens(), shards.total("num_tokens")
        trained = shards.total("num_trained_tokens")
        return EpochFacts(self.source.num_packs, tokens, round(trained * tokens / everything), tokens == everything)

    def _say(self) -> None:
        facts = self.epoch_facts()
        batch = self.config.global_batch_size
        log_single_rank(
            logger,
            logging.INFO,
            "%s (%s): an epoch is %d packs, %d tokens, %s%d of them trained on%s",
            self.dataset_path,
            self.index_split.name,
            facts.packs,
            facts.tokens,
            "" if facts.exact else "about ",
            facts.trained_tokens,
            f", {facts.steps(batch):.1f} steps of {batch} packs" if batch else "",
        )

    @property
    def rows(self) -> PackedRows:
        """The samples without Megatron around them; what loaders read and what is pickled."""
        width = self.config.cu_seqlens_width
        if self._rows is None or self._rows.width != width:  # data sets built since then may need wider rows
            kind = SingleRows if self.config.single_sequences else PackedRows
            self._rows = kind(
                self.source,
                self.order,
                len(self),
                self.config.sequence_length,
                sequence_multiple=self.config.sequence_multiple,
                width=width,
                pad_id=self._pad_id(),
                padding_mask=self.config.padding_mask,
            )
        return self._rows

    def _pad_id(self) -> int | None:
        known = (self.config.pad_id, self.source.pad_id, self._pad_token_id)
        return next((pad for pad in known if pad is not None and pad >= 0), None)

    def attention_costs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """See ``PackedRows.attention_costs``."""
        return self.rows.attention_costs(samples)

    def __reduce__(self) -> Any:
        return self.rows.__reduce__()

    def __len__(self) -> int:
        return self.source.num_packs if self.num_samples is None else int(self.num_samples)

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """One row; see ``PackedRows.__getitem__``, for negative and missing indices too."""
        return self.rows[idx]

    def __getitems__(self, samples: Sequence[int]) -> Sequence[dict[str, torch.Tensor]]:
        """A whole batch; see ``PackedRows.__getitems__``."""
        return self.rows.__getitems__(samples)


def _ends(dataset: Corpus, path: str | None, indices: NDArray[np.integer[Any]] | None, split: Split) -> tuple[int, int]:
    if indices is None:
        return 0, len(dataset)
    if not len(indices):
        raise FormatError(f"{path}: the {split.name} split is empty; give it more of --split, or none at all")
    first, last = int(indices[0]), int(indices[-1]) + 1
    if last - first != len(indices) or (np.diff(indices) != 1).any():
        raise FormatError(f"{path}: the {split.name} split is not a run of consecutive numbers")
    return first, last
