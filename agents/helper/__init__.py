"""`ft-agent-helper`: a small process holds the rights that faults need, so that the agent on the network has none."""
