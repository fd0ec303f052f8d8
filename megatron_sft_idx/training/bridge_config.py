"""Shards as the ``dataset`` of a configuration of Megatron-Bridge, 0.6 or later.

``BridgePackedConfig`` is for text, ``BridgeVLMConfig`` for text with images.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.data.packing import PackedSequenceSpecs

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard.judged import require_shard_judged
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.media import MediaInputs
from megatron_sft_idx.training.packed_shard import ON_REJECTED, PackedShard
from megatron_sft_idx.training.sources import StoredPacks
from megatron_sft_idx.training.vlm_batch import VLMPacks


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
                f"{self.path}: with context parallelism, Megatron-Bridge needs sequences that are stored with padding,"
                " but shards have none; convert them to Parquet (convert --to parquet --pad-seq-to-mult,"
                " docs/bridge.md)"
            )
        train = self._packs(self.path, context)
        valid = None if self.validation_path is None else self._packs(self.validation_path, context)
        return train, valid, None

    def _packs(self, path: str, context: DatasetBuildContext) -> PackedShard:
        unused = {"prompt_template": "{input} {output}", "label_key": "output", "truncation_field": "input"}
        return PackedShard(
            path, context.tokenizer, max_seq_length=self.seq_length, pad_to_max_length=True, seed=self.seed, **unused
        )


@dataclass(kw_only=True)
class BridgeVLMConfig(DatasetProvider):  # type: ignore[misc]
    """Shards with images as they are, for ``megatron.bridge.training.vlm_step``.

    Pass it as ``config.dataset``. Each micro-batch is one pack, in one row of ``seq_length`` positions, so the run's
    micro-batch size must be 1.

    Attributes:
        path: prefix, folder or glob of the shards to train on.
        validation_path: the same for validation; None does not validate.
        seq_length: positions of a row, as the model has it.
        processor: folder of the processor that the shards were made with.
        model_config: folder with the ``config.json`` of the model; None for the folder of the processor.
        sequence_multiple: each sequence is padded to a multiple of this: 2 x context parallel size, times tensor
            parallel size under sequence parallelism. Shards need room for it (``--sequence-multiple``).
        dataloader_type: ``cyclic`` shuffles the packs in each epoch, ``single`` takes them in order. Bridge's ``batch``
            puts a global batch through one collate call and cuts it into rows again, which packed rows cannot be.
        seed: not used by Bridge for either of these.

    Raises:
        FormatError: when Bridge builds the data sets: ``dataloader_type`` is another one; shards hold preference pairs
            or KTO labels, come from different tokenizers, or do not fit; ``sequence_multiple`` does not fit context
            parallelism; or an error of ``MediaInputs``.
        ValueError: the same: packs may not fit ``seq_length``.
    """

    path: str
    seq_length: int
    processor: str
    model_config: str | None = None
    validation_path: str | None = None
    sequence_multiple: int = 1
    seed: int = 1234
    dataloader_type: Literal["single", "cyclic"] | None = "cyclic"

    def build_datasets(self, context: DatasetBuildContext) -> tuple[VLMPacks, VLMPacks | None, None]:
        """The data sets to train and to validate on; Bridge calls this on every rank."""
        if self.dataloader_type not in ("single", "cyclic"):
            raise FormatError(
                f"dataloader_type {self.dataloader_type!r}: micro-batches of packs with images have one row; use"
                " 'cyclic' or 'single'"
            )
        context_parallel = getattr(context.pg_collection, "cp", None)
        parts = 1 if context_parallel is None else context_parallel.size()
        if parts > 1 and self.sequence_multiple % (2 * parts):
            raise FormatError(
                f"sequence_multiple {self.sequence_multiple}: with {parts} context-parallel ranks, sequences are padded"
                f" to multiples of {2 * parts}; pack with --sequence-multiple {2 * parts}, and pass it here too"
            )
        media = MediaInputs(self.processor, self.model_config)
        train = self._packs(self.path, media)
        valid = None if self.validation_path is None else self._packs(self.validation_path, media)
        return train, valid, None

    def _packs(self, path: str, media: MediaInputs) -> VLMPacks:
        shards = ShardSet.open(path)
        for prefix, header in zip(shards.prefixes, shards.headers, strict=True):
            require_shard_judged(prefix, header, (), ON_REJECTED)
        multiple = self.sequence_multiple
        assembler = BatchAssembler(
            StoredPacks(shards), self.seq_length, sequence_multiple=multiple, padding_mask=True, media=media
        )
        return VLMPacks(assembler)
