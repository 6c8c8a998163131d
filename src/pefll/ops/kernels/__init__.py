"""The Triton kernels. Importing them needs Triton, so only `client_axis` does, where one is used."""
