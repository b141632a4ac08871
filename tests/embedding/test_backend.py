"""Every backend implements the protocol that an embedding requires."""

import ast
import inspect

import pytest

from tests.architecture import test_levels
from tf_layoutmap.embedding import backend
from tf_layoutmap.embedding.host.backend import HostBackend
from tf_layoutmap.embedding.servers.backend import ServersBackend
from tf_layoutmap.embedding.tpu.backend import TPUBackend


def members(protocol):
    """Returns the members that a protocol declares and does not inherit."""
    attributes = dict.fromkeys(inspect.get_annotations(protocol))
    methods = {
        name: value
        for name, value in vars(protocol).items()
        if callable(value) or isinstance(value, property)
    }
    return {
        name: value
        for name, value in {**attributes, **methods}.items()
        if not name.startswith("_")
    }


def kind_and_signature_of(member):
    """Returns the kind and the signature of a member."""
    if isinstance(member, property):
        return property, inspect.signature(member.fget)
    return "method", inspect.signature(member)


CASES = [
    (kind, protocol, name, member)
    for kind, protocols in (
        (HostBackend, (backend.Backend, backend.EngineBackend)),
        (ServersBackend, (backend.Backend, backend.EngineBackend)),
        (TPUBackend, (backend.Backend,)),
    )
    for protocol in protocols
    for name, member in members(protocol).items()
]


def test_the_protocols_have_members():
    assert {"is_on_tpu", "mark_shape", "is_built", "read", "enqueue"} <= set(
        members(backend.Backend)
    )
    assert {"open", "follow", "apply_followed"} <= set(
        members(backend.EngineBackend)
    )


@pytest.mark.parametrize(
    "kind, protocol, name, member",
    CASES,
    ids=[f"{kind.__name__}-{name}" for kind, _, name, _ in CASES],
)
def test_a_backend_implements_each_member_of_its_protocol(
    kind, protocol, name, member
):
    found = inspect.getattr_static(kind, name)
    if member is None:
        assert not callable(found)
    else:
        assert kind_and_signature_of(found) == kind_and_signature_of(member)
        assert inspect.getdoc(found)


def own_imports(folder):
    """Maps each module of a folder to its imports from tf_layoutmap."""
    return {
        module: {
            test_levels.own_module(name) for name in test_levels.read(module)[1]
        }
        for module in test_levels.modules()
        if module.startswith(folder)
    }


def test_the_api_does_not_import_backends():
    for module, imported in own_imports("embedding.api.").items():
        assert not [
            name
            for name in imported
            if name and name.startswith(("embedding.host", "embedding.tpu"))
        ], module


def test_embedding_packages_do_not_import_public_modules():
    above = {
        "embedding.serving",
        "embedding.optimizers",
        "embedding.tpu_embedding",
        "embedding.v2.sparse_core",
        "embedding.v2.tpu_embedding_v2",
    }
    for module, imported in own_imports("embedding.").items():
        if module not in above:
            assert not imported & above, module


def test_layers_do_not_use_the_embedding_s_state():
    for module in test_levels.modules():
        if module.startswith("layers."):
            tree, _ = test_levels.read(module)
            assert not [
                node.lineno
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and node.attr == "_state"
            ], module
