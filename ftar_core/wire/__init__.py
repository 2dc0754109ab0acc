"""What travels between processes: ids, messages, and the one parser of bytes from the network.

Imported by every package; imports none of them, and neither torch nor the native core.
"""
