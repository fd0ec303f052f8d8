"""Input files to raw rows: found, recognised by content, cut into pieces for workers."""
