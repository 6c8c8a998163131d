"""GPU kernels: Triton, and CUDA C++ for first layers. Importing them needs Triton, so operations import them late."""
