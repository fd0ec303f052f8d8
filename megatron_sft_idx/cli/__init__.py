"""One console command, ``megatron-sft-idx <verb>``: parses, calls, prints."""
