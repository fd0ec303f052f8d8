"""Chats to token ids with loss masks: ``inputs``, ``chat_rows``, ``template`` and ``tokenizer``, in turn.

``tables`` reads Parquet and Arrow, ``preferences`` rows that judge answers; ``types`` holds what passes between steps.
Nothing here knows of packs or of shards, and nothing writes a file. Tokenizers and templates are read without any
library that could go online.
"""
