from __future__ import annotations

import json

import pytest

from mpjax.serve.errors import MODEL_NOT_FOUND, RequestError

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize(
    ("status", "kind"), [(404, "invalid_request_error"), (500, "server_error")]
)
def test_an_error_is_an_object_of_openais(status, kind):
    found = RequestError("no", "model", status, MODEL_NOT_FOUND).as_object
    assert found == {
        "error": {"message": "no", "type": kind, "param": "model", "code": "model_not_found"}
    }
    assert RequestError("no").as_object["error"]["code"] is None


def test_halves_of_surrogate_pairs_are_spelled_out():
    found = RequestError("\ud800 is wrong", "\udfff")
    text = json.dumps(found.as_object, ensure_ascii=False).encode()
    assert json.loads(text)["error"]["message"] == r"\ud800 is wrong"
    assert found.parameter == r"\udfff"
