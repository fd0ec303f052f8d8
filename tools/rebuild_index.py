"""Repair a damaged shard: runs ``megatron-sft-idx rebuild``."""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["rebuild", *sys.argv[1:]]))
