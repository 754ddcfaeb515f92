"""The environment without what the machine of whoever runs the tests has set for other programs.

Rule: it is imported before anything reads a variable; what a test sets itself comes later. A proxy is left to those
who fetch packages, and is not asked for this machine.
"""

import os

_OF_OTHERS = ("MEMD_", "OPENAI_", "ANTHROPIC_", "OLLAMA_", "PG", "XDG_CONFIG", "XDG_STATE", "XDG_DATA")
_OF_A_TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")
_HERE = ("127.0.0.1", "localhost", "::1")

for _name in [one for one in os.environ if one.startswith(_OF_OTHERS) or one in _OF_A_TERMINAL]:
    del os.environ[_name]
os.environ["XDG_STATE_HOME"] = os.devnull  # no command notes anything for its user
os.environ["MEMD_CONSTANTS"] = "1"  # what users find as constants tests set, see memd/settings/loading.py
if any(one.lower().endswith("_proxy") for one in os.environ):
    for _name in ("no_proxy", "NO_PROXY"):
        os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), *_HERE]))
