"""The HTTP routes of the agent; what they promise is agents/api/models.py."""
