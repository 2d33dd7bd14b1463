"""Networks end to end: checkpoints against float64, and the allowed loss of a precision."""
