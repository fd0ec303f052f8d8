"""Convert packed SFT data to another format: runs ``megatron-sft-idx convert``."""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
