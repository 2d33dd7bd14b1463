"""What kernels are asked: drawn problems, corners, inputs, and how a failing problem shrinks."""
