"""A shard as one self-contained HTML page: no network, under 1 MB whatever the shard."""

from megatron_sft_idx.report.page.render import MAX_NBYTES, make_page
from megatron_sft_idx.storage.publish import Kind, head_of

__all__ = ["MAX_NBYTES", "PAGE", "make_page"]

# How page.html begins, whatever the shard.
_BEGIN = b'<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="megatron-sft-idx inspect">\n'
PAGE = Kind("a page of inspect", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)
