"""memd: a local daemon that gives any language model an unbounded memory without its client noticing."""

import os

# Before numpy is imported anywhere. Measured beside other load on 2 cores: scanning 5,000 vectors takes 0.3 ms at the
# median with one BLAS thread and 16 ms with the default number.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")

__version__ = "0.1.0"
