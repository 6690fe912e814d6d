"""The OpenAPI document of a table of operations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from lmcache.http.operation import Access, Operation
from lmcache.http.problem import PROBLEM_TYPE, Problem

_REFERENCES = "#/components/schemas/{name}"


def refusals_of(operation: Operation) -> dict[int, str]:
    """Every status with problem details that an operation can have, and when."""
    refusals = {400: "it cannot be understood"}
    if operation.access is not Access.PUBLIC:
        refusals[403] = f"only {operation.access.value} may"
    if operation.body is not None:
        refusals |= {408: "the body did not arrive in time", 413: "the body is too large"}
    refusals |= {**operation.refusals, 503: "a part of the server does not answer, or a limit is reached"}
    return dict(sorted(refusals.items()))


def document(operations: Sequence[Operation], version: str, title: str, description: str) -> dict[str, Any]:
    """Returns the OpenAPI document as JSON values."""
    types: list[Any] = [Problem]
    for operation in operations:
        types += [kind for kind in (operation.body, operation.query) if kind is not None]
        answers = (operation.answer, *operation.other_answers.values())
        types += [kind for kind in answers if kind is not None and not isinstance(kind, str)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCES)
    schema_of = {str(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.open_path, {})[operation.method.lower()] = _operation(
            operation, schema_of, components
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": version,
            "description": description,
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"admin_token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, schema_of: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    words = [word for word in re.split(r"[^a-z_]+", operation.open_path) if word]
    described: dict[str, Any] = {
        "operationId": "_".join([operation.method.lower(), *words]),
        "summary": operation.summary,
        "description": f"For {operation.access.value}.",
        "responses": {str(operation.status): _answer(operation, operation.status, operation.answer, schema_of)},
    }
    for status, kind in operation.other_answers.items():
        described["responses"][str(status)] = _answer(operation, status, kind, schema_of)
    for status, reason in refusals_of(operation).items():
        if status not in operation.other_answers:
            described["responses"][str(status)] = {
                "description": reason,
                "content": {PROBLEM_TYPE: {"schema": schema_of[str(Problem)]}},
            }
    if operation.access is not Access.PUBLIC:
        described["security"] = [{}, {"admin_token": []}]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", operation.open_path)
    ]
    if operation.query is not None:
        parameters += _query(components[operation.query.__name__])
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"content": {"application/json": {"schema": schema_of[str(operation.body)]}}}
    return described


def _query(schema: dict[str, Any]) -> list[dict[str, Any]]:
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": described}
        for name, described in schema["properties"].items()
    ]


def _answer(operation: Operation, status: int, kind: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    description = HTTPStatus(status).phrase
    if kind is None:
        return {"description": description}
    if isinstance(kind, str):
        content: dict[str, Any] = {kind: {"schema": {"type": "string"}}}
        if operation.path == "/":
            content["text/html"] = {"schema": {"type": "string"}}
        return {"description": description, "content": content}
    return {"description": description, "content": {"application/json": {"schema": schema_of[str(kind)]}}}
