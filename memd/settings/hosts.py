"""Which hosts are this machine.

Rule: decided by the name alone, never by asking a resolver: what a name leads to may change a moment later.
"""

from __future__ import annotations

import ipaddress


def is_this_machine(host: str) -> bool:
    """Whether a host, as it stands in an address, is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
