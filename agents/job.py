"""Requests to the job's coordinator on behalf of whoever asked this agent.

The coordinator records the principal, so there is one connection a principal (a few are kept open), and reads have one
of their own: a status that hangs must not hold up an evict. Calls block and belong on a thread. What the coordinator
says goes to the user as it is; what the connection does is put into words here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from agents.api.models import ActionAnswer, EventRecord, EventsAnswer, JobState
from agents.because import NOTHING, Because
from agents.host import coordinators
from agents.host.errors import HostError
from agents.host.workers import Worker
from agents.injection.guard import JobFacts
from agents.problems import ApiProblem
from agents.settings import CoordinatorAccess
from ftar_core.errors import AuthError, FtarError, ProtocolRefused, WireError
from ftar_core.wire.address import parse_address
from ftar_core.wire.messages import JobView, OpReply
from ftar_core.wire.operator import OperatorClient
from ftar_core.wire.tokens import read_token

TIMEOUT_S = 2.5  # below the 3 s that ftctl gives an agent, so that the sentence about the coordinator arrives
CONNECTIONS = 16
READS = ("status", "events", "hangs", "accounting")
# OpReply.code -> code of the published contract
CODES = {"refused": "refused", "unknown": "unknown-replica", "conflict": "conflict", "failed": "failed"}


class JobRelay:
    """`request` raises ApiProblem for everything but an "ok"."""

    def __init__(self, access: CoordinatorAccess | None, timeout_s: float = TIMEOUT_S) -> None:
        self._access = access
        self._timeout_s = timeout_s
        self._clients: OrderedDict[tuple[str, bool], OperatorClient] = OrderedDict()
        self._lock = threading.Lock()

    def state(self, principal: str) -> JobState:
        return job_state(self._job(self.request(principal, "status")))

    def facts(self, principal: str) -> JobFacts:
        """What the guards of replicas go by. Never raises."""
        if self._access is None:
            return JobFacts()
        try:
            job = self.state(principal)
        except ApiProblem as error:
            return JobFacts(problem=f"{error.body.thing}: {error.body.reason}")
        contributing = tuple(r.name for r in job.replicas if r.state == "contributing")
        lacking = len(contributing) < job.replicas_wanted
        out = tuple(r.name for r in job.replicas if lacking and r.state not in ("contributing", "spare", "draining"))
        return JobFacts(True, contributing, job.min_replicas, wanted=job.replicas_wanted, out=out)

    def process(self, principal: str) -> Worker:
        """The coordinator's process, if it is one of this machine. Raises HostError."""
        if self._access is None:
            return coordinators.unknown()
        try:
            job = self.state(principal)
        except ApiProblem as error:
            raise HostError("find the coordinator", 0, f"{error.body.thing}: {error.body.reason}") from None
        return coordinators.process_of(job.pid, job.started)

    def saved(self, principal: str) -> OpReply:
        """Where the job's time went (`accounting`) and its checkpoints, as the coordinator has last saved it: never
        less than it said before."""
        return self.request(principal, "accounting")

    def events(self, principal: str, after: int, limit: int) -> EventsAnswer:
        """The coordinator's own events; `boot` is its term's start, with which its numbering begins."""
        reply = self.request(principal, "events", after=after)
        events = [
            EventRecord(
                seq=e.seq,
                time=e.time,
                source=e.source,
                kind=e.kind,
                object=e.object,
                reason=e.reason,
                injected=e.injected,
                incident=e.incident,
                action=e.action,
                evidence=e.evidence,
            )
            for e in reply.events[:limit]
        ]
        job = reply.job
        boot = f"{job.pid}-{job.started:.3f}" if job is not None else ""
        return EventsAnswer(events=events, last=events[-1].seq if events else after, boot=boot)

    def act(  # noqa: PLR0917
        self,
        principal: str,
        op: str,
        reason: str,
        replica: str = "",
        force: bool = False,
        rejoin: bool = True,
        dry_run: bool = False,
        because: Because = NOTHING,
        max_share: float = 0.0,
    ) -> ActionAnswer:
        reply = self.request(
            principal,
            op,
            replica=replica,
            reason=reason,
            force=force,
            rejoin=rejoin,
            dry_run=dry_run,
            because=because,
            max_share=max_share,
        )
        return ActionAnswer(code=reply.code, text=reply.text)

    def request(
        self,
        principal: str,
        op: str,
        *,
        replica: str = "",
        reason: str = "",
        rejoin: bool = True,
        force: bool = False,
        after: int = 0,
        dry_run: bool = False,
        because: Because = NOTHING,
        max_share: float = 0.0,
    ) -> OpReply:
        client, where = self._client(principal, reads=op in READS)
        thing = f"replica {replica}" if replica else where
        try:
            reply = client.request(
                op,
                replica=replica,
                reason=reason,
                rejoin=rejoin,
                force=force,
                after=after,
                dry_run=dry_run,
                incident=because.incident,
                injected=because.injected,
                max_share=max_share,
            )
        except (TimeoutError, OSError, FtarError) as error:
            raise _in_words(error, where, changes=op not in READS) from None
        if reply.code != "ok":
            raise ApiProblem(CODES.get(reply.code, "coordinator"), thing, reply.text, _hint(reply.code, op))
        return reply

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _client(self, principal: str, *, reads: bool) -> tuple[OperatorClient, str]:
        if self._access is None:
            raise ApiProblem(
                "no-coordinator",
                "coordinator",
                "this agent knows no coordinator",
                "name one under `coordinator` in the agent's configuration, or ask an agent of a node of the job",
            )
        where = f"coordinator of job {self._access.job}"
        with self._lock:
            client = self._clients.get((principal, reads))
            if client is None:
                client = self._clients[principal, reads] = self._open(self._access, principal, where)
                if len(self._clients) > CONNECTIONS:
                    # Not closed here: another thread may be using it. Its last user drops it, and that closes it.
                    self._clients.popitem(last=False)
            self._clients.move_to_end((principal, reads))
            return client, where

    def _open(self, access: CoordinatorAccess, principal: str, where: str) -> OperatorClient:
        try:
            host, port = parse_address(access.address)
            token = read_token(access.token_file, "operator token file")
        except (ValueError, FtarError) as error:
            raise ApiProblem("coordinator", where, str(error), getattr(error, "hint", "")) from None
        return OperatorClient(host, port, access.job, token, principal, self._timeout_s)

    @staticmethod
    def _job(reply: OpReply) -> JobView:
        if reply.job is None:
            raise ApiProblem("coordinator", "coordinator", "its answer says nothing about the job")
        return reply.job


def job_state(view: JobView) -> JobState:
    """Field for field; both sides of this are published, so a field that one side lacks is an error of ours."""
    return JobState.model_validate(view, from_attributes=True)


def _in_words(error: Exception, where: str, *, changes: bool) -> ApiProblem:
    perhaps = "; whether the request was carried out is not known" if changes else ""
    hint = "ftctl coordinator status"
    if isinstance(error, AuthError | ProtocolRefused):
        return ApiProblem("coordinator", where, str(error), error.hint or hint)
    if isinstance(error, WireError):
        return ApiProblem("coordinator", where, f"what answers there is no coordinator: {error}", hint)
    if isinstance(error, ConnectionRefusedError):
        return ApiProblem(
            "coordinator",
            where,
            "nobody listens there: the coordinator is not running",
            "start ftar-coordinator again; its log says why it ended",
        )
    if isinstance(error, TimeoutError):
        return ApiProblem("coordinator", where, f"no answer in time{perhaps}", hint)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ApiProblem("coordinator", where, f"{text}{perhaps}", hint)


def _hint(code: str, op: str) -> str:
    if code == "unknown":
        return "ftctl status lists the replicas"
    if code == "refused" and op in ("drain", "evict"):
        return "--force overrides the guard"
    return ""
