"""GPU kernels in Triton, and in CUDA C++ for first layers. They import Triton, so functions import them when needed."""
