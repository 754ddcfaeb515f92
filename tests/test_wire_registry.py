"""One list of APIs: what is in it is routed, counted and documented under its own name."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest

from memd.messages import Message
from memd.telemetry.metrics import Metrics
from memd.wire import registry
from memd.wire.api import Api
from memd.wire.chat import ChatApi
from memd.wire.registry import APIS, api_of


class NewApi(ChatApi):
    """An API that nothing but the registry knows."""

    name = "new"
    path = "/new"


def counted(metrics: Metrics) -> set[str]:
    return {values[0] for values in metrics.requests.counts}


def test_a_request_belongs_to_the_api_of_its_path_and_only_when_it_is_posted() -> None:
    for api in APIS:
        assert api_of("POST", f"/v1{api.path}") is api
        assert api_of("POST", api.path) is api
        assert api_of("GET", f"/v1{api.path}") is None
        assert api_of("POST", f"/v1{api.path}/x") is None
    assert api_of("POST", "/v1/embeddings") is None


def test_no_api_has_the_path_or_name_of_another() -> None:
    for one, other in permutations(APIS, 2):
        assert not one.path.endswith(other.path)
        assert one.name != other.name


def test_an_api_that_is_added_to_the_registry_is_routed_and_counted_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert counted(Metrics()) == {api.name for api in APIS}
    new = NewApi()
    monkeypatch.setattr(registry, "APIS", (*APIS, new))
    assert api_of("POST", "/v1/new") is new
    metrics = Metrics()
    metrics.requests.add("new", "full", "none")
    assert counted(metrics) == {*(api.name for api in APIS), "new"}, "nothing is counted as `other`"


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_a_text_is_put_in_front_of_a_message(api: Api) -> None:
    name = "input" if api.name == "responses" else "messages"
    own = api.encode_message(Message("user", "And now?"))
    for content in ("And now?", [{"type": "input_text" if name == "input" else "text", "text": "And now?"}], own):
        message = {"role": "user", "content": content} if content is not own else own
        raw = api.parse(msgspec.json.encode({name: [message]})).raw_messages[0]
        again = api.parse(msgspec.json.encode({name: [api.in_front(raw, "Before.")]}))
        assert again.messages[0].text.split() == ["Before.", "And", "now?"]
