"""Packed SFT data of one format to another: ``megatron-sft-idx convert``, for those who look for it in tools/."""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
