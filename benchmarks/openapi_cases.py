"""Requests made by schemathesis from the server's own OpenAPI document, valid ones and ones that break it."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

__all__ = ["SMALL_SERVER", "Tried", "try_cases"]

# A server on which no request can ask for much: a valid one may ask for an answer of any length the model has room for.
SMALL_SERVER: Mapping[str, Any] = {"max_model_len": 128, "max_num_seqs": 16, "num_gpu_blocks_override": 1024}
_MOST_ANSWERS = 3
_CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@dataclass(slots=True)
class Tried:
    """How many requests were sent to each operation, how they were answered, and what failed."""

    cases: collections.Counter[str] = field(default_factory=collections.Counter)
    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    faults: dict[str, str] = field(default_factory=dict)


def try_cases(url: str, cases: int, *, seed: int = 1) -> Tried:
    """Send at least ``cases`` requests, spread over the operations; those that take a body get ten times as many."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.base_url = url
    operations = [result.ok() for result in schema.get_all_operations()]
    tried = Tried()
    with requests.Session() as session:
        # Operations that take nothing cannot be given anything wrong: what they leave over goes to those with a body.
        while operations and (left := cases - tried.cases.total()) > 0:
            weights = [10 if operation.body else 1 for operation in operations]
            for operation, weight in zip(operations, weights, strict=True):
                share = max(1, math.ceil(left * weight / sum(weights) / 2))
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                    _try_operation(operation, mode, share, seed, session, tried)
            operations = [operation for operation in operations if operation.body]
            seed += 1
    return tried


def _try_operation(
    operation: Any, mode: GenerationMode, examples: int, seed: int, session: requests.Session, tried: Tried
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        _tame(case.body)
        response = case.call(session=session, timeout=60)
        tried.cases[operation.label] += 1
        tried.statuses[response.status_code] += 1
        for name, fault in _faults(case, response):
            tried.faults.setdefault(f"{operation.label}: {name}", fault)

    try:
        run()
    except Unsatisfiable:
        return


def _faults(case: Any, response: Any) -> Iterator[tuple[str, str]]:
    try:
        case.validate_response(response, checks=_CHECKS)
    except FailureGroup as group:
        for failure in group.exceptions:
            yield type(failure).__name__, f"{failure}\n{case.as_curl_command()}"[:3000]
    except Failure as failure:
        yield type(failure).__name__, f"{failure}\n{case.as_curl_command()}"[:3000]


def _tame(body: Any) -> None:
    """Keep valid requests for very many answers small: ten thousand of them are allowed, and take their time."""
    if isinstance(body, dict):
        for name, value in body.items():
            if name in ("n", "best_of") and type(value) is int and value > _MOST_ANSWERS:
                body[name] = _MOST_ANSWERS
            else:
                _tame(value)
    elif isinstance(body, list):
        for value in body:
            _tame(value)
