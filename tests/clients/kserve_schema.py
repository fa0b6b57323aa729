"""Checks objects of KServe against the models of its Python package: unknown fields, missing fields and other types are
errors. Run as a process of its own, for the reason that kserve_session.py has. The objects come as JSON on the standard input."""
import json
import sys

import kserve.models
import kubernetes.client.models

PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float)}


def check(value, kind, place):
    """The value as the model of this kind, which refuses missing fields."""
    if kind in PLAIN:
        assert isinstance(value, PLAIN[kind]), f"{place}: {value!r} is no {kind}"
        return value
    if kind.startswith("list["):
        assert isinstance(value, list), f"{place}: {value!r} is no list"
        return [check(one, kind[5:-1], f"{place}[{index}]") for index, one in enumerate(value)]
    assert isinstance(value, dict), f"{place}: {value!r} is no object"
    if kind.startswith("dict("):
        return {key: check(one, kind[5:-1].partition(", ")[2], f"{place}.{key}") for key, one in value.items()}
    model = getattr(kserve.models, kind, None)
    if model is None:
        return getattr(kubernetes.client.models, kind).model_validate(value, extra="forbid")
    fields = {wire: name for name, wire in model.attribute_map.items()}
    unknown = value.keys() - fields.keys()
    assert not unknown, f"{place}: {kind} has no {sorted(unknown)}"
    return model(**{fields[key]: check(one, model.openapi_types[fields[key]], f"{place}.{key}") for key, one in value.items()})


for document in json.load(sys.stdin):
    version = document["apiVersion"].removeprefix("serving.kserve.io/v")
    check(document, f"V{version}{document['kind']}", f"{document['kind']} {document['metadata']['name']}")
