"""What `ftctl chaos init` writes."""

from __future__ import annotations

import re

TEXT = """\
# Run it in a lab of its own:   ftctl chaos run {file} --lab
# What may stand here:          ftctl chaos schema
version: 1
name: {name}
description: >
  A rail of a node goes down while the job trains. Its traffic moves to the backup rail, and nobody waits.
tags: [network]
environments: [lab]                   # anywhere else it is refused
lab: {{replicas: 3, rails: 2}}
vars: {{victim: r1}}
steady_state:                         # before (else nothing is injected) and after
  - {{expect: replicas.contributing == 3, within: 30s}}
  - {{expect: faults.active == 0}}
  - {{expect: rails.down == 0}}
method:
  - {{steps: 25}}                       # calm ones, to compare with
  - {{inject: link-down, target: {{replica: $victim, rail: active}}, duration: 20s}}
  - {{steps: 10}}
  - {{revert: all}}
  - {{steps: 10}}
objectives:
  detect_ms: {{max: 100}}
  stall_ms: {{of: survivors, max: 250}}
  steps_lost: {{max: 0}}
stop_if:
  - {{expect: replicas.contributing < 2}}
cleanup:                              # always, whatever happens
  - {{revert: all}}
  - {{ensure: replica.$victim.state == contributing, timeout: 60s}}
"""


def text_for(stem: str) -> str:
    """A playbook named after its file."""
    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:60] or "playbook"
    return TEXT.format(name=name, file=f"{stem}.yaml")
