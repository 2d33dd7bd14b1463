"""What each op means to the oracle: one `OpSpec` per file, found through `ops.table`."""
