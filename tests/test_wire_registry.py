"""One list of APIs: by its path a request belongs to one, and each puts a text in front of a message of its own."""

from __future__ import annotations

import msgspec
import pytest

from memd.messages import Message
from memd.telemetry.metrics import Metrics
from memd.wire.api import Api
from memd.wire.registry import APIS, api_of


def counted(metrics: Metrics) -> set[str]:
    return {values[0] for values in metrics.requests.counts}


def test_a_request_belongs_to_the_api_of_its_path_and_only_when_it_is_posted() -> None:
    for api in APIS:
        assert api_of("POST", f"/v1{api.path}") is api
        assert api_of("POST", api.path) is api
        assert api_of("GET", f"/v1{api.path}") is None
        assert api_of("POST", f"/v1{api.path}/x") is None
    assert api_of("POST", "/v1/embeddings") is None


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_a_text_is_put_in_front_of_a_message(api: Api) -> None:
    name = "input" if api.name == "responses" else "messages"
    own = api.encode_message(Message("user", "And now?"))
    for content in ("And now?", [{"type": "input_text" if name == "input" else "text", "text": "And now?"}], own):
        message = {"role": "user", "content": content} if content is not own else own
        raw = api.parse(msgspec.json.encode({name: [message]})).raw_messages[0]
        again = api.parse(msgspec.json.encode({name: [api.in_front(raw, "Before.")]}))
        assert again.messages[0].text.split() == ["Before.", "And", "now?"]
