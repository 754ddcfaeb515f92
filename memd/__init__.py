"""memd: a local daemon that gives any language model an unbounded memory without its client noticing."""

__version__ = "0.1.0"
