"""Megatron-core models for packed rows on any machine: kinds of attention, and CPU substitutes for CUDA calls.

``thd`` passes the boundaries to the attention (``PackedSeqParams``). ``mask`` masks attention across them.
``unpacked`` puts every sequence into its own row. All three get the same tokens and must learn the same. ``te`` is
``thd`` with the kernels of Transformer Engine, which need a GPU.

megatron-core 0.16 hard-codes the device ``cuda`` in its optimizer, its schedules and its gradient buffers, checks
gradients by the name of their CUDA type, and keeps random states of the GPU. Inside the context ``megatron_device``,
these use the CPU instead. On a machine with CUDA the context does nothing, so a script can always enter it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.training.batch import Tensors, segments_of

# ---- kinds of attention ----


ATTENTION = ("thd", "mask", "unpacked", "te")

_TOKENWISE = ("tokens", "labels", "loss_mask", "position_ids")


class SegmentAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each segment of ``cu_seqlens``, one segment at a time: THD without Transformer Engine."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend: query [positions, heads, size], key, value [positions, groups, size] to [positions, heads * size]."""
        if packed_seq_params is None:
            raise ValueError("packed_seq_params is None, but this attention needs it to find the segments")
        bounds = packed_seq_params.cu_seqlens_q_padded
        bounds = (packed_seq_params.cu_seqlens_q if bounds is None else bounds).unique_consecutive().tolist()
        dropout = self.dropout if self.training else 0.0
        outputs = []
        for start, stop in pairwise(bounds):
            q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
            output = scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, scale=self.softmax_scale, enable_gqa=True
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def _require_known(attention: str) -> None:
    if attention not in ATTENTION:
        raise FormatError(f"attention: {attention!r}, choose one of {', '.join(ATTENTION)}")


def layer_spec(attention: str) -> ModuleSpec:
    """Return a megatron.core layer with this attention. ImportError: ``te`` without Transformer Engine."""
    _require_known(attention)
    if attention == "te":
        if find_spec("transformer_engine") is None:
            raise ImportError(
                "attention te needs a GPU and Transformer Engine: pip install 'transformer-engine[pytorch]'; thd,"
                " mask and unpacked work on any machine"
            )
        return get_gpt_layer_with_transformer_engine_spec()
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if attention == "thd":
        spec.submodules.self_attention.submodules.core_attention = SegmentAttention
    return spec


def build_gpt(config: TransformerConfig, attention: str, vocab_size: int, length: int) -> GPTModel:
    """Build a model with this attention. ImportError: ``te`` without Transformer Engine."""
    return GPTModel(
        config,
        layer_spec(attention),
        vocab_size,
        length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )


def model_inputs(batch: Tensors, attention: str) -> tuple[dict[str, Any], Tensor]:
    """Return the model's arguments for a batch, and the loss mask in the shape of the losses that it returns."""
    laid = laid_out(batch, attention)
    length, device = laid["tokens"].shape[1], laid["tokens"].device
    inputs: dict[str, Any] = {
        "input_ids": laid["tokens"],
        "position_ids": laid["position_ids"],
        "labels": laid["labels"],
    }
    inputs |= {"attention_mask": None, "packed_seq_params": None}
    if attention in ("thd", "te"):
        inputs["packed_seq_params"] = packed_seq_params(batch)
    elif attention == "mask":
        inputs["attention_mask"] = block_mask(batch)
    else:
        inputs["attention_mask"] = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    return inputs, laid["loss_mask"]


def laid_out(batch: Tensors, attention: str, keys: Sequence[str] = _TOKENWISE) -> Tensors:
    """Return tensors with one value per position, [rows, length], in the shape of the model's inputs and losses."""
    _require_known(attention)
    if attention in ("thd", "te"):
        return {key: batch[key].reshape(1, -1) for key in keys}
    return {key: batch[key] for key in keys} if attention == "mask" else _unpacked(batch, keys)


def packed_seq_params(batch: Tensors) -> PackedSeqParams:
    """Return the boundaries of a whole batch, with its rows concatenated."""
    logical = _end_to_end(batch["cu_seqlens"])
    padded = _end_to_end(batch["cu_seqlens_padded"]) if "cu_seqlens_padded" in batch else None
    longest = int(batch["max_seqlen"].max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=logical,
        cu_seqlens_kv=logical,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _end_to_end(cu_seqlens: Tensor) -> Tensor:
    """Convert offsets of each row, [rows, width], to offsets in the concatenated rows; repeated entries are kept."""
    lengths = cu_seqlens.diff(dim=1).flatten()
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def block_mask(batch: Tensors) -> Tensor:
    """Return Megatron's mask, bool [rows, 1, length, length]: True for later positions and for other sequences."""
    segment = segments_of(batch)
    across = segment[:, :, None] != segment[:, None, :]
    return (across | torch.ones_like(across).triu(1))[:, None]


def _unpacked(batch: Tensors, keys: Sequence[str]) -> Tensors:
    """Return each segment as its own row, padded at the end, which causal attention of earlier positions never sees."""
    spans = [
        (row, start, stop)
        for row, bounds in enumerate(batch.get("cu_seqlens_padded", batch["cu_seqlens"]).tolist())
        for start, stop in pairwise(bounds)
        if start < stop
    ]
    return {
        key: pad_sequence([batch[key][row, start:stop] for row, start, stop in spans], batch_first=True) for key in keys
    }


# ---- a machine without CUDA ----


def current_device() -> torch.device:
    """Return the GPU of this process, or the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Redirect Megatron's CUDA calls to the CPU inside this context; do nothing if there is CUDA.

    ``torch.cuda`` is changed for all threads of the process. Calls with a device argument are changed only in this
    thread.
    """
    if torch.cuda.is_available():
        yield
        return
    originals = {name: getattr(torch.cuda, name) for name in _WITHOUT_CUDA}
    try:
        for name, substitute in _WITHOUT_CUDA.items():
            setattr(torch.cuda, name, substitute)
        with _CudaMeansCpu():
            yield
    finally:
        for name, original in originals.items():
            setattr(torch.cuda, name, original)


class _CpuStream:
    """A stream without waiting: on the CPU, calls are complete when they return."""

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *_, **__: None


# The CUDA functions that Megatron calls: current_device everywhere, current_stream when gradients are reduced (0.19 and
# later), synchronize before it writes a checkpoint.
_WITHOUT_CUDA: dict[str, Callable[..., Any]] = {
    "current_device": lambda: "cpu",
    "current_stream": lambda *_, **__: _CpuStream(),
    "synchronize": lambda *_, **__: None,
}


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrite calls of torch functions with the device ``cuda``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple(
                "cpu" if isinstance(one, (str, torch.device)) and str(one)[:4] == "cuda" else one for one in args
            )
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Gradient clipping and the mixed precision optimizer look for names such as torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def connect() -> None:
    """Join the process group of ``torchrun``, or create one with only this process."""
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    if torch.distributed.is_torchelastic_launched():
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group(backend)
    else:
        # No other process joins, so a store in memory is enough; it needs no free port.
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def seed_everything(seed: int) -> None:
    """Seed torch and Megatron; without CUDA, do not use Megatron's tracker of GPU random states."""
    torch.manual_seed(seed)
    without = not torch.cuda.is_available()
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=without, force_reset_rng=True)
