"""What each op that fuses two others means to the oracle: one `OpSpec` per file.

Each asks the specs of its two ops for what they know: references, draws and numbers.
"""
