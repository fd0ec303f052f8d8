"""Input files, local or in object stores, to raw rows: found, recognised by content, cut into pieces for workers.

What a row says is not looked at here; a row that is no JSON is handed on as the error that it is, with its number.
"""
