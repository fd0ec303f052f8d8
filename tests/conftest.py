"""Says in pytest's header which build of the native kernels is tested."""

from __future__ import annotations

from megatron_sft_idx import _native


def pytest_report_header() -> str:
    return f"native kernels: {_native.__file__}"
