"""Networks end to end: checkpoints against float64, and what a precision may lose."""
