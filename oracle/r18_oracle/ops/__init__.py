"""The oracle's specification of each op: one `OpSpec` per file, found through `ops.table`."""
