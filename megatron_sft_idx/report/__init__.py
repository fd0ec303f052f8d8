"""What a shard holds, shown to people."""

from megatron_sft_idx.report.diff import Comparison, compare_shards
from megatron_sft_idx.report.find import Match, find_text
from megatron_sft_idx.report.marked import mark_pack
from megatron_sft_idx.report.page import PAGE, make_page
from megatron_sft_idx.report.survey import Survey, survey_shard

__all__ = [
    "PAGE",
    "Comparison",
    "Match",
    "Survey",
    "compare_shards",
    "find_text",
    "make_page",
    "mark_pack",
    "survey_shard",
]
