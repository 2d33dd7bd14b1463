"""The other ops: elementwise kernels, pooling, softmax and linear."""
