"""From what monitors see to verdicts and incidents. Everything but desk.py is pure: time comes in as a number."""
