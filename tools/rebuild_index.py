"""A damaged shard to a whole one: ``megatron-sft-idx rebuild``, for those who look for it in tools/."""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["rebuild", *sys.argv[1:]]))
