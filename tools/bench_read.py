"""How fast a shard is read here: ``megatron-sft-idx bench-read``, for those who look for it in tools/."""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench-read", *sys.argv[1:]]))
