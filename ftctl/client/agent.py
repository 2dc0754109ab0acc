"""One agent, asked over HTTP: a Unix socket, TLS, or plain HTTP on loopback.

What comes back is not trusted: bodies are bounded, redirects are not followed (a token must not travel to where an
answer points), answers are checked against the published contract, and everything has a deadline. Proxies in the
environment are ignored: agents are on the management network.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from pydantic import BaseModel, TypeAdapter, ValidationError

from agents.api.audit import AuditAnswer
from agents.api.cordon import CordonAnswer, CordonRequest
from agents.api.evidence import StacksAnswer, StacksRequest
from agents.api.halt import HaltAnswer, HaltRequest
from agents.api.health import ClearAnswer, ClearRequest, HealthAnswer
from agents.api.models import (
    DEFAULT_PORT,
    ERROR_CODES,
    ActionAnswer,
    Alive,
    CoordinatorAction,
    ErrorBody,
    EventsAnswer,
    FaultSpec,
    FaultView,
    InjectRequest,
    JobState,
    LinksAnswer,
    NodeView,
    ReplicaAction,
    RevertAnswer,
    SupervisionAction,
)
from agents.api.policy import ModeAnswer, ModeRequest, PolicyAnswer
from ftctl.client.transport import AgentTransport, NoAnswer, Request, TooLarge
from ftctl.config import Inventory, Node
from ftctl.durations import show
from ftctl.errors import AgentRefused, AgentUnreachable, CliError
from ftctl.exit_codes import ExitCode

MAX_BODY_BYTES = 16 * 1024 * 1024
# An action is answered when it has been carried out and probed, or the coordinator has decided: longer than a read.
ACTION_TIMEOUT_S = 20.0

T = TypeVar("T")


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class AgentClient:
    """The calls of agents.api.models, each within `timeout_s` (actions: at least ACTION_TIMEOUT_S).

    Every call raises AgentUnreachable, AgentRefused, or CliError when the answer is not of the contract.
    """

    def __init__(self, node: Node, transport: AgentTransport, timeout_s: float) -> None:
        self.node = node.name
        self._node = node
        self._transport = transport
        self.timeout_s = timeout_s

    async def alive(self) -> Alive:
        return await self._get("/healthz", Alive)

    async def view(self) -> NodeView:
        return await self._get("/v1/node", NodeView)

    async def cordon(self, request: CordonRequest) -> CordonAnswer:
        return await self._post("/v1/node/cordon", request, CordonAnswer)

    async def uncordon(self, request: CordonRequest) -> CordonAnswer:
        return await self._post("/v1/node/uncordon", request, CordonAnswer)

    async def metrics(self) -> str:
        """In Prometheus' text format."""
        return await self.text("/metrics")

    async def text(self, path: str) -> str:
        """What a route answers, whatever it is."""
        return (await self._ask("GET", path, deadline_s=self.timeout_s)).decode("utf-8", "replace")

    async def links(self, *, rail: str, state: str, pid: int | None, each: bool) -> LinksAnswer:
        query = {"rail": rail, "state": state, "each": str(each).lower(), **({"pid": str(pid)} if pid else {})}
        return await self._get("/v1/links", LinksAnswer, query)

    async def fault_kinds(self) -> list[FaultSpec]:
        return await self._get("/v1/fault-kinds", list[FaultSpec])

    async def faults(self) -> list[FaultView]:
        """Open ones, and those reverted in the last hour."""
        return await self._get("/v1/faults", list[FaultView])

    async def inject(self, request: InjectRequest) -> FaultView:
        return await self._post("/v1/faults", request, FaultView)

    async def revert(self, fault: str) -> RevertAnswer:
        return await self._post(f"/v1/faults/{quote(fault, safe='')}/revert", None, RevertAnswer)

    async def keepalive(self, fault: str) -> FaultView:
        """The controller of a fault with `dead_man_s` is alive."""
        return await self._post(f"/v1/faults/{quote(fault, safe='')}/keepalive", None, FaultView)

    async def revert_all(self) -> RevertAnswer:
        return await self._post("/v1/faults/revert-all", None, RevertAnswer)

    async def halt(self, verb: str, request: HaltRequest) -> HaltAnswer:
        """`verb`: halt or allow. Within `timeout_s` also for a halt: one agent that hangs must not keep the caller from
        hearing about the others, and it may be asked again."""
        content = request.model_dump_json().encode()
        return await self._call("POST", f"/v1/faults/{verb}", HaltAnswer, content=content, deadline_s=self.timeout_s)

    async def health(self) -> HealthAnswer:
        return await self._get("/v1/health", HealthAnswer)

    async def clear(self, request: ClearRequest) -> ClearAnswer:
        return await self._post("/v1/clear", request, ClearAnswer)

    async def policy(self) -> PolicyAnswer:
        return await self._get("/v1/policy", PolicyAnswer)

    async def policy_mode(self, request: ModeRequest) -> ModeAnswer:
        return await self._post("/v1/policy/mode", request, ModeAnswer)

    async def audit(self, since: float) -> AuditAnswer:
        return await self._get("/v1/audit", AuditAnswer, {"since": str(since), "limit": "5000"})

    async def events(self, after: int = 0, *, limit: int = 1000, wait_s: float = 0.0) -> EventsAnswer:
        query = {"after": str(after), "limit": str(limit), "wait_s": str(wait_s)}
        return await self._get("/v1/events", EventsAnswer, query, extra_s=wait_s)

    async def job(self) -> JobState:
        return await self._get("/v1/job", JobState)

    async def job_events(self, after: int = 0) -> EventsAnswer:
        return await self._get("/v1/job/events", EventsAnswer, {"after": str(after)})

    async def replica_action(self, verb: str, replica: str, request: ReplicaAction) -> ActionAnswer:
        """`verb`: drain, evict or rejoin."""
        return await self._post(f"/v1/job/replicas/{quote(replica, safe='')}/{verb}", request, ActionAnswer)

    async def stacks(self, replica: str, request: StacksRequest) -> StacksAnswer:
        """What its processes on this node are doing."""
        return await self._post(f"/v1/replicas/{quote(replica, safe='')}/stacks", request, StacksAnswer)

    async def supervise(self, verb: str, replica: str, reason: str) -> ActionAnswer:
        """`verb`: start, stop, restart or rejoin the processes that this agent supervises."""
        wish = SupervisionAction(reason=reason)
        return await self._post(f"/v1/replicas/{quote(replica, safe='')}/{verb}", wish, ActionAnswer)

    async def finish(self, request: CoordinatorAction) -> ActionAnswer:
        """End the job with the running step: all replicas end with the same state."""
        return await self._post("/v1/job/finish", request, ActionAnswer)

    async def force_quorum(self, request: CoordinatorAction) -> ActionAnswer:
        return await self._post("/v1/job/force-quorum", request, ActionAnswer)

    # --- one request -------------------------------------------------------------------------------------------------

    async def _get(
        self, path: str, kind: type[T], query: Mapping[str, str] | None = None, *, extra_s: float = 0.0
    ) -> T:
        return await self._call("GET", path, kind, query=query, deadline_s=self.timeout_s + extra_s)

    async def _post(self, path: str, body: BaseModel | None, kind: type[T]) -> T:
        content = body.model_dump_json(exclude_none=True).encode() if body is not None else b""
        return await self._call("POST", path, kind, content=content, deadline_s=max(self.timeout_s, ACTION_TIMEOUT_S))

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        deadline_s: float,
        query: Mapping[str, str] | None = None,
        content: bytes = b"",
    ) -> T:
        body = await self._ask(method, path, deadline_s=deadline_s, query=query, content=content)
        try:
            answer: T = _adapter(kind).validate_json(body)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CliError(
                f"agent of {self.node}",
                f"its answer to {method} {path} is not of this version's contract ({where}: {first['msg']})",
                "compare the versions: ftctl version, and ft-agent on that node",
            ) from None
        return answer

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        deadline_s: float,
        query: Mapping[str, str] | None = None,
        content: bytes = b"",
    ) -> bytes:
        sent = False

        def started() -> None:
            nonlocal sent
            sent = True

        request = Request(method, f"{path}?{urlencode(query)}" if query else path, content)
        try:
            asked = self._transport.ask(request, limit=MAX_BODY_BYTES, started=started)
            status, body = await asyncio.wait_for(asked, deadline_s)
        except asyncio.TimeoutError:
            raise AgentUnreachable(
                self.node,
                f"no answer within {show(deadline_s)}",
                hint="give it longer with --timeout, or look at the agent on that node",
                indefinite=sent and method == "POST",
            ) from None
        except NoAnswer as error:
            raise AgentUnreachable(
                self.node, self._why(error), hint=self._start_hint(), indefinite=sent and method == "POST"
            ) from None
        except TooLarge:
            raise CliError(f"agent of {self.node}", f"its answer is larger than {MAX_BODY_BYTES} bytes") from None
        if status != 200:
            raise self._refusal(status, body)
        return body

    def _refusal(self, status: int, body: bytes) -> CliError:
        if 300 <= status < 400:
            return CliError(
                f"agent of {self.node}",
                f"answered with a redirect (HTTP {status}), which is not followed",
                f"correct the url of {self.node} in the inventory",
            )
        try:
            error = ErrorBody.model_validate_json(body)
        except ValidationError:
            return CliError(
                f"agent of {self.node}",
                f"answered HTTP {status} without saying why; perhaps something else listens on {self._node.url}",
                f"correct the url of {self.node} in the inventory",
            )
        code = ExitCode(ERROR_CODES[error.code][1]) if error.code in ERROR_CODES else ExitCode.FAILED
        hint = error.hint
        if not hint and error.code == "unauthorized":
            hint = "give the token of this cluster: token_file in the inventory, or --token-file"
        return AgentRefused(
            self.node, error.code, printable(error.thing), printable(error.reason), hint=printable(hint), code=code
        )

    def _why(self, error: NoAnswer) -> str:
        """Why there is no connection, in words."""
        where = self._node.socket or self._node.url
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return f"its certificate is not accepted: {cause.verify_message}"
            if isinstance(cause, ssl.SSLError):
                return f"no TLS on {where} ({cause.reason or cause})"
            if isinstance(cause, OSError) and cause.errno is not None:
                return {
                    errno.ENOENT: f"its socket {where} is not there (the agent is not running)",
                    errno.ECONNREFUSED: f"nobody listens on {where} (the agent is not running)",
                    errno.EACCES: f"no permission to open {where}",
                }.get(cause.errno, f"{where}: {cause.strerror or cause}")
            cause = cause.__cause__ or cause.__context__
        return f"{where}: {error or type(error).__name__}"

    def _start_hint(self) -> str:
        return f"look at the agent on {self.node}; if it is a lab's: ftctl lab status"


def printable(text: str) -> str:
    """A text from the network without control characters, which could rewrite the user's terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:2000])


def transport_of(
    inventory: Inventory, node: Node, context: ssl.SSLContext | None, *, keep: bool = True
) -> AgentTransport:
    """The connections to one agent. `context` is needed for https only; `keep` them for the next request."""
    url = urlsplit(node.base_url)
    headers = [
        ("host", url.netloc.encode("idna").decode()),
        ("authorization", f"Bearer {inventory.token}"),
        ("user-agent", "ftctl"),
        ("accept", "*/*"),
        *([] if keep else [("connection", "close")]),
    ]
    return AgentTransport(
        socket=str(node.socket) if node.socket is not None else None,
        host=url.hostname or "",
        port=url.port or DEFAULT_PORT,
        context=context if url.scheme == "https" and node.socket is None else None,
        keep=keep,
        headers=headers,
    )


def tls_context(inventory: Inventory) -> ssl.SSLContext | None:
    """For the https nodes of an inventory, made once. Raises CliError when the CA file is none."""
    if not any(node.base_url.startswith("https:") for node in inventory.nodes):
        return None
    try:
        return ssl.create_default_context(cafile=str(inventory.ca_file) if inventory.ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise CliError(
            f"ca_file {inventory.ca_file}", f"no certificates in PEM form: {error}", code=ExitCode.USAGE
        ) from None
