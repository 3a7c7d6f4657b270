"""Home of the compiled kernels, ``w4a4ops``; empty until ``make kernels`` has run."""
