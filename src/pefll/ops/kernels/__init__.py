"""The Triton kernels. Importing them needs Triton, so only `client_axis` and `keys` do, where one is used."""
