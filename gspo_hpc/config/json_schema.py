"""The JSON schema of a config: what editors complete and check a YAML file with."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from gspo_hpc.config import plugins
from gspo_hpc.config.schema import Config


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12), with the meaning, range, default and allowed values of every key."""
    found = Config.model_json_schema()
    for name, kind in plugins.algorithms().items():
        one = found["$defs"][kind.__name__]
        one["properties"]["name"]["description"] = f"{kind.__doc__} {kind.paper}."
        if name != plugins.DEFAULT:  # a config without a name means the default algorithm, and no other
            one["required"] = ["name"]
    return {"$schema": GenerateJsonSchema.schema_dialect, **found, "title": "Config of a gspo-hpc run"}
