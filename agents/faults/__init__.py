"""One file a fault; contract.py says what a fault must offer, WRITING_FAULTS.md teaches how to write one."""
