"""`python -m memd` is the `memd` command. Rule: nothing but the call."""

from __future__ import annotations

from memd.cli.main import main

if __name__ == "__main__":
    main(prog_name="memd")
