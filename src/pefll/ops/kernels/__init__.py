"""The Triton kernels. Importing them needs Triton, so only operations do, where one is used."""
