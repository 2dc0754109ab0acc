"""What follows from a verdict: rules as data (rules.py), and a pure decision over them (engine.py)."""
