"""The settings: the model of config.yaml, and reading it from files, variables and flags."""
