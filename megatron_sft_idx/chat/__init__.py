"""Convert chats to token ids with loss masks, in the steps ``inputs``, ``chat_rows``, ``template`` and ``tokenizer``.

``tables`` reads Parquet and Arrow, ``preferences`` reads rows with preferences, and ``types`` has the data passed
between steps. Nothing here knows packs or shards, or writes a file. Tokenizers and templates are loaded without any
library that could access the network.
"""
