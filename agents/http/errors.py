"""Every error leaves the agent as an ErrorBody; nothing else is ever sent, not even for a bug."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from agents.api.models import ErrorBody
from agents.injection.problems import FaultProblem
from agents.problems import ApiProblem

_LOG = logging.getLogger(__name__)


def install(app: FastAPI) -> None:
    app.add_exception_handler(ApiProblem, _api)
    app.add_exception_handler(FaultProblem, _fault)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _bug)


def answer(body: ErrorBody, status: int) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body.model_dump(mode="json"), status, headers)


async def _api(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiProblem)  # noqa: S101 - as registered above
    return answer(error.body, error.status)


async def _fault(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, FaultProblem)  # noqa: S101
    details = {"fault": error.entry.id} if error.entry is not None else {}
    problem = ApiProblem(error.code, error.thing, error.reason, error.hint, details=details)
    return answer(problem.body, problem.status)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    words = {"extra_forbidden": "there is no such key", "missing": "is missing", "json_invalid": "not JSON"}
    reason = words.get(first["type"], str(first["msg"]).removeprefix("Value error, "))
    body = ErrorBody(
        code="bad-request", thing=where or "request", reason=reason, hint="the contract: GET /openapi.json"
    )
    return answer(body, 422)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101
    if error.status_code == 404:
        body = ErrorBody(code="not-found", thing=request.url.path, reason="there is no such route")
    elif error.status_code == 405:
        body = ErrorBody(code="not-found", thing=request.url.path, reason=f"it does not know {request.method}")
    elif error.status_code == 400:  # a body that the JSON parser gave up on
        return answer(ErrorBody(code="bad-request", thing=request.url.path, reason="not JSON"), 422)
    else:
        body = ErrorBody(code="bad-request", thing=request.url.path, reason=str(error.detail))
    return answer(body, error.status_code)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    _LOG.error("%s %s: a bug in the agent", request.method, request.url.path, exc_info=error)
    reason = f"a bug in the agent ({type(error).__name__}); its log says where"
    return answer(ErrorBody(code="failed", thing=request.url.path, reason=reason), 500)
