"""Show the content of a shard: runs ``megatron-sft-idx inspect``."""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["inspect", *sys.argv[1:]]))
