"""Watching the node. Reading is done through agents/host; a verdict is a pure function of readings, with its reason."""
