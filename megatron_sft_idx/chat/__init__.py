"""Chats to token ids with masks: files, rows, templates and tokenizers."""
