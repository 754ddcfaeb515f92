"""A part of llama.cpp's own server tests that takes seconds; `make llama-tests` runs all of them."""

import llamacpp_binary
import llamacpp_sources
import pytest
from llamacpp_suite import Setting, compare

FILES = ("unit/test_basic.py", "unit/test_compat_oai_responses.py", "unit/test_chat_completion.py")
SELECTED = (
    "health or models or props or slots or responses or logprobs"
    " or (completion_stream and Book) or (prefill and Whill-Whill)"
)
PASSED_DIRECTLY_MIN = 10


@pytest.mark.llama
def test_what_passes_against_llama_server_passes_through_memd() -> None:
    tests = llamacpp_sources.server_tests()
    if tests is None or llamacpp_sources.server_sources() is None:
        pytest.skip("llama.cpp's sources were not fetched: python tests/support/llamacpp_sources.py")
    try:
        server = llamacpp_binary.build()
    except llamacpp_binary.CannotBuild as why:
        pytest.skip(str(why))
    found = compare(Setting(tests, server, real_models=False, select=(*FILES, "-k", SELECTED)))
    assert len(found.passed_directly()) >= PASSED_DIRECTLY_MIN, found.directly
    assert not found.faults(), {test: found.of(test) for test in found.faults()}
