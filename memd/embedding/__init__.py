"""The embedding model: from text to unit vectors."""

import os

# From 1.31 on ONNX Runtime reports to its makers over the network how it is used, out of a database that it keeps in
# the home directory. It asks for this variable while it is loaded, which only modules of this package do.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# The tokenizers' own threads would take the processors that requests need.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
