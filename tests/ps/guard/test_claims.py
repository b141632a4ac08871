"""Tests which coordinator may use a server."""

import json
import socket

import pytest
import tensorflow as tf

from tf_layoutmap.ps import claims, processes


class LocalProcess(processes.Process):
    """A server whose ops run in this process."""

    device = "/device:CPU:0"


@pytest.fixture
def server():
    """Yields a server that no coordinator uses, and whose port is open."""
    tf.config.list_logical_devices()  # Initializes the eager context.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        one = LocalProcess("ps", 0, f"127.0.0.1:{port}")
        yield one
        claims._replace(one, stored(one), "")


def stored(server):
    return claims._replace(server, "no coordinator has this text", "")


def owner(port, token="other"):
    return json.dumps(
        {
            "token": token,
            "process": 7,
            "host": "there",
            "address": ["127.0.0.1", port],
        }
    )


def test_a_coordinator_may_claim_its_servers_again(server):
    claims.claim([server])
    text = stored(server)
    assert json.loads(text)["token"] == claims._TOKEN
    assert claims._runs(json.loads(text))
    claims.claim([server])
    assert stored(server) == text


def test_servers_of_a_running_coordinator_are_not_used(server, monkeypatch):
    listener = claims._listen("127.0.0.1")
    running = owner(listener.getsockname()[1], claims._TOKEN)
    claims._replace(server, "", running)
    monkeypatch.setattr(claims, "_TOKEN", "x" * 32)
    with pytest.raises(RuntimeError, match="process 7 on host there"):
        claims.claim([server])
    assert stored(server) == running


def test_a_coordinator_that_does_not_answer_is_running(server, monkeypatch):
    monkeypatch.setattr(claims, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        claims._replace(server, "", owner(listener.getsockname()[1]))
        with pytest.raises(RuntimeError, match="process 7 on host there"):
            claims.claim([server])


@pytest.mark.parametrize("is_port_in_use", [False, True])
def test_servers_of_an_ended_coordinator_are_used(server, is_port_in_use):
    listener = claims._listen("127.0.0.1")
    port = listener.getsockname()[1]
    if not is_port_in_use:
        listener.close()
    claims._replace(server, "", owner(port, "x" * 32))
    claims.claim([server])
    assert json.loads(stored(server))["token"] == claims._TOKEN


def test_claims_are_released_if_one_server_is_in_use(server, monkeypatch):
    calls = []
    texts = {"a": "", "b": owner(1)}

    def replace(one, expected, claim):
        calls.append(one.address)
        found = texts[one.address]
        if found == expected:
            texts[one.address] = claim
        return found

    monkeypatch.setattr(claims, "_replace", replace)
    monkeypatch.setattr(claims, "_description", lambda one: owner(2, "me"))
    monkeypatch.setattr(claims, "_runs", lambda found: True)
    both = [processes.Process("ps", i, one) for i, one in enumerate("ab")]
    with pytest.raises(RuntimeError, match="ps 1 at b is used by another"):
        claims.claim(both)
    assert texts == {"a": "", "b": owner(1)}
