"""From CUDA C++ to a running program: compiler, launches, tensor maps, memory and streams."""
