"""The life of a fault: guard, ledger on disk, deadline, verification, revert, watchdog."""
