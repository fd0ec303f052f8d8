"""``BridgePackedConfig``: shards as the ``dataset`` of a configuration of Megatron-Bridge, 0.6 or later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.data.packing import PackedSequenceSpecs

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.training.packed_shard import PackedShard


@dataclass(kw_only=True)
class BridgePackedConfig(DatasetProvider):  # type: ignore[misc]
    """Shards to train on and to validate on, as they are: ``config.dataset = BridgePackedConfig(path=..., ...)``.

    Attributes:
        path: prefix, folder or glob of the shards to train on.
        validation_path: the same of those to validate on; None does not validate.
        seq_length: positions of a row, that of the model.
        seed: of the order in which Bridge draws packs.
        dataloader_type: ``"batch"`` shuffles each epoch; Bridge leaves out what is left of an epoch (or of the packs
            to validate on) behind its last whole global batch.
        enable_offline_packing, offline_packing_specs: as Bridge's own packed data has them; by these it knows that
            every pipeline stage needs the boundaries. They are derived.

    Raises:
        FormatError: when Bridge builds the data sets: as ``PackedShard``; or the run has context parallelism, for which
            sequences have to be stored with padding (``convert --pad-seq-to-mult``).
    """

    path: str
    seq_length: int
    validation_path: str | None = None
    seed: int = 1234
    dataloader_type: Literal["single", "cyclic", "batch", "external"] | None = "batch"
    enable_offline_packing: bool = True
    offline_packing_specs: PackedSequenceSpecs = field(default_factory=PackedSequenceSpecs)

    def __post_init__(self) -> None:
        self.offline_packing_specs.packed_sequence_size = self.seq_length

    def build_datasets(self, context: DatasetBuildContext) -> tuple[PackedShard, PackedShard | None, None]:
        """The data sets to train and to validate on; Bridge calls this on every rank."""
        context_parallel = getattr(context.pg_collection, "cp", None)
        if context_parallel is not None and context_parallel.size() > 1:
            raise FormatError(
                f"{self.path}: with context parallelism, Megatron-Bridge wants sequences stored with padding, which"
                " shards are not; make Parquet of them (convert --to parquet --pad-seq-to-mult, docs/bridge.md)"
            )
        train = self._packs(self.path, context)
        valid = None if self.validation_path is None else self._packs(self.validation_path, context)
        return train, valid, None

    def _packs(self, path: str, context: DatasetBuildContext) -> PackedShard:
        unused = {"prompt_template": "{input} {output}", "label_key": "output", "truncation_field": "input"}
        return PackedShard(
            path, context.tokenizer, max_seq_length=self.seq_length, pad_to_max_length=True, seed=self.seed, **unused
        )
