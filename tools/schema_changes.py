"""Prints the operators that differ between two versions of the ONNX standard: `schema_changes.py 26 28`.

`crates/repair/src/opset.rs` has a rule for each operator whose attributes or inputs differ, and for each new one. More datatypes
need no rule, since an engine refuses a datatype that its operator lacks. Run this with the newest package `onnx` when `KNOWN` rises.
"""
import sys

from onnx import defs


def parts(schema):
    attributes = {name: (str(a.type), a.default_value.SerializeToString(), a.required) for name, a in schema.attributes.items()}
    values = [(value.name, str(value.option), value.type_str) for value in [*schema.inputs, *schema.outputs]]
    types = {t.type_param_str: frozenset(t.allowed_type_strs) for t in schema.type_constraints}
    return attributes, values, types


def changes(old, new):
    names = sorted({s.name for s in defs.get_all_schemas_with_history() if s.domain == "" and old < s.since_version <= new})
    for name in names:
        after = defs.get_schema(name, new, "")
        try:
            before = defs.get_schema(name, old, "")
        except defs.SchemaError:
            yield name, "new"
            continue
        what = [part for part, was, now in zip(["attributes", "values", "datatypes"], parts(before), parts(after)) if was != now]
        yield name, ", ".join(what) or "words"


if __name__ == "__main__":
    for name, what in changes(*map(int, sys.argv[1:3])):
        print(f"{name}: {what}")
