"""``python -m megatron_sft_idx``: the console command without its script."""

import sys

from megatron_sft_idx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
