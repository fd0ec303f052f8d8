"""A shard as one self-contained HTML page: no network, under 1 MB whatever the shard."""

from megatron_sft_idx.report.page.render import MAX_NBYTES, make_page

__all__ = ["MAX_NBYTES", "make_page"]
