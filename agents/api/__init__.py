"""The published contract between agents and everybody who talks to them (HTTP + JSON, OpenAPI)."""
