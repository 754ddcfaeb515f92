"""The embedding model: from text to unit vectors."""

import os

# ONNX Runtime from 1.31 on reports usage to its makers over the network, from a database in the home directory. It
# reads this variable while it is loaded, which only modules of this package do.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# Threads of the tokenizers would take processor time from requests.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
