"""One library a file; `loka.kernels.registry` lists their kernels."""
