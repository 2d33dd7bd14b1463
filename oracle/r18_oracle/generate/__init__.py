"""The problems and inputs given to kernels, and how a failing problem shrinks."""
