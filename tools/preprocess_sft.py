"""Make a packed shard from chats: runs ``megatron-sft-idx preprocess``."""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
