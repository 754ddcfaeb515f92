"""What a test needs that not every machine has: one marker each, with its reason.

Rule: `make test` on Linux runs all of these; CI is such a machine. A test that can do without has no marker.
"""

from __future__ import annotations

import sys

import pytest
from llamacpp_sources import chat_templates

# /dev/full, mount namespaces and the preloaded injector, which knows the C library's names of the calls, are Linux's:
# no other system has a real disk that is full, read-only or failing on demand. A contributor's Mac runs all the rest.
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has disks that fail when a test wants it")

# `make test` fetches the templates with llama.cpp's sources. A bare pytest, and `make quick`, which fetches nothing,
# must still be able to collect and run the rest.
shipped_templates = pytest.mark.skipif(
    not chat_templates(),
    reason="llama.cpp's sources are not there: python tests/support/llamacpp_sources.py fetches them",
)
