"""Whether the files at a prefix keep every rule of FORMAT.md: quickly, or byte for byte."""

from megatron_sft_idx.verify.findings import Finding, Report
from megatron_sft_idx.verify.run import OnProgress, verify_shard

__all__ = ["Finding", "OnProgress", "Report", "verify_shard"]
