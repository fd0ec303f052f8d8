"""What a shard holds: ``megatron-sft-idx inspect``, for those who look for it in tools/."""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["inspect", *sys.argv[1:]]))
