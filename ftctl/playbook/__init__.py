"""Playbooks: a chaos experiment as a file. Steady state -> method -> steady state -> clean-up, always."""
