"""Who asks, and may they: `Authorization: Bearer TOKEN` (RFC 6750) to a principal with a role."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from agents.api.words import Role
from agents.http.context import Agent
from agents.problems import ApiProblem
from agents.tokens import Principal

AGENT = "ftctl.agent"  # in a request's scope, where one application serves several agents
_bearer = HTTPBearer(auto_error=False, description="A token of the agent's tokens_file")


async def this_agent(request: Request) -> Agent:
    agent: Agent = request.scope.get(AGENT, request.app.state.agent)
    return agent


ThisAgent = Annotated[Agent, Depends(this_agent)]


def require(role: Role) -> Callable[..., Awaitable[Principal]]:
    """A dependency that gives the principal, who has at least this role."""

    async def check(
        agent: ThisAgent, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)] = None
    ) -> Principal:
        thing = f"agent of {agent.settings.node}"
        if given is None:
            raise ApiProblem("unauthorized", thing, "a token is needed (Authorization: Bearer TOKEN)")
        principal = agent.tokens.whose(given.credentials)
        if principal is None:
            raise ApiProblem("unauthorized", thing, "this token is not known here")
        if not principal.role.includes(role):
            reason = f"{principal.name} is {principal.role.value}, and this needs {role.value}"
            raise ApiProblem("forbidden", thing, reason, f"use a token with the role {role.value}")
        return principal

    return check


Viewer = Annotated[Principal, Depends(require(Role.VIEWER))]
Operator = Annotated[Principal, Depends(require(Role.OPERATOR))]
Chaos = Annotated[Principal, Depends(require(Role.CHAOS))]
