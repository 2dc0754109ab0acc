"""Systems that train through failures, side by side: one model, one data, one pace, one journal, one supervisor.

`trainers.py` is what a replica runs in each of them, `stable.py` the process that they are forked from, `place.py` the
network they are in, `systems.py` what each of them needs besides, `drive.py` the supervisor and the faults, and
`journals.py` what the journals say: pure, so that rows can be made again from what was kept.
"""
