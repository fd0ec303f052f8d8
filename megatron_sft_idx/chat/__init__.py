"""Chats to token ids with loss masks: ``inputs``, ``chat_rows``, ``template`` and ``tokenizer``, in turn.

``types`` holds what passes from one step to the next. Nothing here knows of packs or of shards, and nothing
writes a file. Tokenizers and templates are read without any library that could go online.
"""
