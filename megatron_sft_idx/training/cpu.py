"""Megatron-core on a machine without CUDA.

megatron-core 0.16 names the device ``cuda`` in its optimizer, its schedules and its gradient buffers, checks gradients
by the name of their CUDA type, and keeps random states of the GPU. ``megatron_device`` turns those into their CPU
counterparts while it is entered. Where CUDA exists it does nothing at all, so a script may always enter it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore
from torch.overrides import TorchFunctionMode

__all__ = ["connect", "current_device", "megatron_device", "seed_everything"]


def current_device() -> torch.device:
    """The GPU of this process, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """While entered, in this thread, what Megatron asks of CUDA is given by the CPU; nothing where CUDA exists."""
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


class _Stream:
    """A stream that nothing waits for: on the CPU, what was called is done."""

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *_, **__: None


# What Megatron calls by itself: the device everywhere, streams where gradients are reduced (0.19 and later), the last
# before it writes a checkpoint.
_WITHOUT_CUDA: dict[str, Callable[..., Any]] = {
    "current_device": lambda: "cpu",
    "current_stream": lambda *_: _Stream(),
    "synchronize": lambda *_: None,
}


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites calls of torch functions that name the device ``cuda``."""

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
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Gradient clipping and the mixed precision optimizer look for names such as torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def connect() -> None:
    """Join the process group that ``torchrun`` describes, or form one of this process alone."""
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    if torch.distributed.is_torchelastic_launched():
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group(backend)
    else:
        # A store in memory needs no free port: nobody else will join.
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def seed_everything(seed: int) -> None:
    """Seed torch and Megatron; without CUDA Megatron's tracker of GPU random states stands aside."""
    torch.manual_seed(seed)
    without = not torch.cuda.is_available()
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=without, force_reset_rng=True)
