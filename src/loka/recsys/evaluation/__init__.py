"""How good predictions are: metrics, predictions by row, the comparison of two runs."""
