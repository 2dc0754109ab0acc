"""What follows from a verdict: rules as data (agents/api/policyfile.py), a pure decision over them (engine.py), what
was done so far (book.py), and the thread that hears verdicts and acts (runner.py) with its hands (hands.py)."""
