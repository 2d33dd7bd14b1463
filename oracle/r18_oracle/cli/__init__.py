"""The oracle's commands, which the entry-point group `r18.commands` brings to `r18`."""
