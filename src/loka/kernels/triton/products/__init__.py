"""LoKA's own products: FP8 for what the libraries serve badly, bf16 for skinny sites.

`tiles` and `rules` are pure and need no Triton; the modules with operators import it and are loaded when a
kernel is first used.
"""
