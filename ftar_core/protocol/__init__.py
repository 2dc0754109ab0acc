"""Decisions, pure: (state, event, now) -> (state, effects). No clock, socket, thread or randomness lives here."""
