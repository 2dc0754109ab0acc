"""What goes wrong in ftctl, as the user sees it: the thing, the reason, the next command, and an exit code.

CliError                          FAILED       anything that ends a command
├── UsageProblem                  USAGE        a flag, an argument or a configuration file is wrong; nothing was done
├── AgentUnreachable              UNREACHABLE  no answer; `indefinite` says that the request may have been carried out
└── AgentRefused                  by its code  the agent answered with an error (agents.api.models.ErrorBody)
"""

from __future__ import annotations

from ftctl.exit_codes import ExitCode


class CliError(Exception):
    """`thing` is what the sentence is about, `reason` what is wrong with it, `hint` the next command (may be empty)."""

    def __init__(self, thing: str, reason: str, hint: str = "", code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(f"{thing}: {reason}" if thing else reason)
        self.thing = thing
        self.reason = reason
        self.hint = hint
        self.code = code


class UsageProblem(CliError):
    def __init__(self, thing: str, reason: str, hint: str = "") -> None:
        super().__init__(thing, reason, hint, ExitCode.USAGE)


class AgentUnreachable(CliError):
    """No (complete) answer from an agent. `indefinite`: the request had been sent, so it may have been carried out."""

    def __init__(self, node: str, reason: str, *, hint: str = "", indefinite: bool = False) -> None:
        super().__init__(f"agent of {node}", reason, hint, ExitCode.UNREACHABLE)
        self.node = node
        self.indefinite = indefinite


class AgentRefused(CliError):
    """`error_code` is one of agents.api.models.ERROR_CODES."""

    def __init__(self, node: str, error_code: str, thing: str, reason: str, *, hint: str, code: ExitCode) -> None:
        super().__init__(thing, reason, hint, code)
        self.node = node
        self.error_code = error_code
