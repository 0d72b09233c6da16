"""The JSON schema of a config: what editors complete and check a YAML file with.

It takes a value where the loader takes it, as far as one value by itself goes: a test compares them. Rules between keys
are the loader's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from gspo_hpc.config import plugins, schema
from gspo_hpc.config.schema import Config

_NULL = {"type": "null"}


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12), with the meaning, range, default and allowed values of every key."""
    found = Config.model_json_schema()
    for name, kind in plugins.algorithms().items():
        one = found["$defs"][kind.__name__]
        one["properties"] = {key: _or_null(value) for key, value in one["properties"].items()}
        one["properties"]["name"]["description"] = f"{kind.__doc__} {kind.paper}."
        if name != plugins.DEFAULT:  # a config without a name means the default algorithm, and no other
            one["required"] = ["name"]
            one["properties"]["name"]["type"] = "string"
    for name in Config.model_fields:  # `batch:` with nothing behind it is a section of defaults
        if name == "algorithm":
            found["properties"][name]["oneOf"] += [_in_file(found["$defs"]["Gspo"]["properties"]), _NULL]
        else:  # not `anyOf`, with which editors would no longer say what is wrong inside
            found["$defs"][schema.section_class(name).__name__]["type"] = ["object", "null"]
    return {"$schema": GenerateJsonSchema.schema_dialect, **found, "title": "Config of a gspo-hpc run"}


def _in_file(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an algorithm in a user's file, given the keys that every algorithm has: it may have more."""
    shared = {key: {k: v for k, v in one.items() if k != "default"} for key, one in keys.items() if key != "name"}
    about = "An algorithm in a file of your own, path/to/file.py:Class."
    name = {"type": "string", "pattern": r"\.py:[^\W\d]\w*$(?!\n)", "description": about}
    return {"type": "object", "required": ["name"], "properties": {"name": name} | shared, "title": "AlgorithmInFile"}


def _or_null(key: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a key that may be null, too: algorithms take it for the default."""
    if "const" in key:
        return {name: value for name, value in key.items() if name != "const"} | {
            "type": [key["type"], "null"],
            "enum": [key["const"], None],
        }
    if "type" in key:
        return key | {"type": [key["type"], "null"]} | ({"enum": [*key["enum"], None]} if "enum" in key else {})
    return key if _NULL in key.get("anyOf", ()) else {"anyOf": [key, _NULL]}
