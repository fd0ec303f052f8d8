"""Chats to a packed shard: ``megatron-sft-idx preprocess``, for those who look for it in tools/."""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
