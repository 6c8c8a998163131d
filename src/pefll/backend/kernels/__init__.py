"""The GPU kernels: Triton's, and CUDA C++ for first layers. Importing them needs Triton, so only operations do."""
