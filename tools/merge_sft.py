"""Merge shards with ``megatron-sft-idx merge``; with ``split`` as the first word, run ``megatron-sft-idx split``.

python tools/merge_sft.py data/parts --output-prefix data/train
python tools/merge_sft.py split data/train --shards 8 --output-prefix parts/train
"""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    verb = [] if arguments[:1] in (["merge"], ["split"]) else ["merge"]
    sys.exit(main([*verb, *arguments]))
