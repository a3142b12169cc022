"""The table of models in docs/models.md is the registry's. `python -m tests.docs.families` writes it."""

from gpubound.models import registry

from .families import NAMES, parts, text


def test_the_page_lists_the_registrys_models():
    assert parts()[1] == text()


def test_every_model_has_a_name():
    assert {*registry.WRAPPERS, *(kind for types in registry.FAMILIES.values() for kind in types)} <= NAMES.keys()
