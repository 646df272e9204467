"""LoKA's own Triton kernels. Nothing here is imported before a kernel is first used: Triton is optional."""
