"""Both backends have what an embedding asks of its backend."""

import inspect

import pytest

from tf_layoutmap.embedding.api import backend
from tf_layoutmap.embedding.host.backend import HostBackend
from tf_layoutmap.embedding.tpu.backend import TPUBackend


def members(protocol):
    """The members that a protocol itself declares, by name."""
    attributes = dict.fromkeys(inspect.get_annotations(protocol))
    methods = {name: value for name, value in vars(protocol).items()
               if callable(value) or isinstance(value, property)}
    return {name: value for name, value in {**attributes, **methods}.items()
            if not name.startswith("_")}


def shape_of(member):
    """What must be equal of a member: its kind and its signature."""
    if isinstance(member, property):
        return property, inspect.signature(member.fget)
    return "method", inspect.signature(member)


CASES = [
    (kind, protocol, name, member)
    for kind, protocols in (
        (HostBackend, (backend.Backend, backend.EngineBackend)),
        (TPUBackend, (backend.Backend,)))
    for protocol in protocols for name, member in members(protocol).items()]


def test_the_protocols_have_members():
    assert {"is_on_tpu", "mark_shape", "is_built", "read", "enqueue"} <= set(
        members(backend.Backend))
    assert {"open", "follow", "apply_followed"} <= set(
        members(backend.EngineBackend))


@pytest.mark.parametrize(
    "kind, protocol, name, member", CASES,
    ids=[f"{kind.__name__}-{name}" for kind, _, name, _ in CASES])
def test_a_backend_has_each_member_as_its_protocol_says(
        kind, protocol, name, member):
    found = inspect.getattr_static(kind, name)
    if member is None:
        assert not callable(found)
    else:
        assert shape_of(found) == shape_of(member)
        assert inspect.getdoc(found)
