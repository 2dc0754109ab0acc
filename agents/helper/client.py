"""One request to the helper, from the agent's side. Calls block and belong on a thread."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from agents.helper import wire
from agents.recovery.sockets import named
from ftar_core.errors import WireError
from ftar_core.wire.codec import FrameParser, encode

CONNECT_S = 2.0


class HelperGone(Exception):
    """No answer, and why. `sent`: the request had gone out, so whether it was carried out is not known."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


def ask(path: Path, request: wire.AnyRequest, timeout_s: float, proofs: Sequence[int] = ()) -> wire.AnyReply:
    """Raises HelperGone. A refusal is an answer. `proofs`: descriptors that go along (SCM_RIGHTS)."""
    until = time.monotonic() + timeout_s
    sent = False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(CONNECT_S)
            with named(path) as name:
                sock.connect(name)
            sent = True
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # turned away: the reason is there to read
                data = encode(wire.Asked(wire.VERSION, request))
                sent_bytes = socket.send_fds(sock, [data], list(proofs)) if proofs else 0
                sock.sendall(data[sent_bytes:])
            parser = FrameParser(wire.reply, wire.REPLY_LIMIT)
            while True:
                sock.settimeout(max(0.01, until - time.monotonic()))
                answer = sock.recv(1 << 18)
                if not answer:
                    raise HelperGone("it closed the connection without an answer", sent=True)
                found = parser.feed(answer)
                if found:
                    return found[0]
        except TimeoutError:
            raise HelperGone("no answer in time", sent=sent) from None
        except (FileNotFoundError, ConnectionRefusedError):
            raise HelperGone(f"nobody listens at {path}", sent=sent) from None
        except PermissionError:
            raise HelperGone(f"{path} does not let this user in (agent_user in its configuration)", sent=sent) from None
        except OSError as error:
            raise HelperGone(error.strerror or str(error), sent=sent) from None
        except WireError as error:
            raise HelperGone(f"what answers at {path} is no helper of this version: {error}", sent=sent) from None
