"""Chats to tokens and masks: rows, templates, spans, token ids."""
