"""How fast a shard is read here, and by which settings: ``megatron-sft-idx bench-read``."""

from megatron_sft_idx.bench_read.measure import Measured, Report, bench_read
from megatron_sft_idx.bench_read.memory_limit import MemoryLimit
from megatron_sft_idx.bench_read.recommend import Recommendation, recommend
from megatron_sft_idx.bench_read.sampling import Plan
from megatron_sft_idx.bench_read.settings import SETTINGS, Setting
from megatron_sft_idx.bench_read.shown import report_dict, report_lines

__all__ = [
    "SETTINGS",
    "Measured",
    "MemoryLimit",
    "Plan",
    "Recommendation",
    "Report",
    "Setting",
    "bench_read",
    "recommend",
    "report_dict",
    "report_lines",
]
