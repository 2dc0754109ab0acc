"""The application: routes, errors, limits."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from agents.api.models import ErrorBody
from agents.http import (
    audited,
    cordon_routes,
    errors,
    evidence_routes,
    fault_routes,
    halt_routes,
    health_routes,
    job_routes,
    node_routes,
    policy_routes,
)
from agents.http.audited import Audited
from agents.http.context import VERSION, Agent
from agents.http.limits import BodyLimit

ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "Every error, whatever the status"},
    422: {"model": ErrorBody, "description": "The request is wrong"},
}


def make_app(agent: Agent | None) -> FastAPI:
    """None: every request says in its scope which agent it is for (auth.AGENT)."""
    # The documentation pages load scripts from elsewhere; the contract itself is at /openapi.json, behind a token.
    app = FastAPI(title="ftctl agent", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.agent = agent
    errors.install(app)
    for routes in (
        audited,
        node_routes,
        health_routes,
        cordon_routes,
        halt_routes,
        fault_routes,
        evidence_routes,
        job_routes,
        policy_routes,
    ):
        app.include_router(routes.router, responses=ERRORS)
    app.add_middleware(Audited)
    app.add_middleware(BodyLimit)
    return app
