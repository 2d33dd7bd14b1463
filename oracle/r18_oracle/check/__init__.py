"""One call of a kernel under guard, and every named check of it."""
