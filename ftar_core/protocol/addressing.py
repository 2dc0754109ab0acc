"""Who is told whose addresses.

An epoch names all its members, but a member connects to two of them only: its neighbours in the ring. The record and
the machine hold every address of every rank; what is sent to a member holds those of three replicas. So an epoch change
costs bytes in proportion to the members, not to their square.
"""

from __future__ import annotations

import msgspec

from ftar_core.wire.messages import Commit, EpochInfo, Join, MemberInfo, Message, NewEpoch, Prepare


class Addressing:
    """Remembers what it worked out for the latest epoch, since that goes to everybody."""

    def __init__(self) -> None:
        self._epoch: EpochInfo | None = None
        self._bare: list[MemberInfo] = []
        self._index: dict[str, int] = {}

    def near(self, epoch: EpochInfo, replica: str) -> EpochInfo:
        """The epoch as this member needs it; the same object where nothing is to be left out."""
        if epoch is not self._epoch:
            self._epoch = epoch
            self._bare = [msgspec.structs.replace(m, ranks=()) for m in epoch.members]
            self._index = {m.replica: i for i, m in enumerate(epoch.members)}
        me, count = self._index.get(replica), len(self._bare)
        if me is None or count <= 3:
            return epoch
        members = self._bare.copy()
        for i in (me - 1, me, me + 1):
            members[i % count] = epoch.members[i % count]
        return EpochInfo(id=epoch.id, members=tuple(members))

    def narrow(self, message: Message, replica: str) -> Message:
        """The message as this member needs it."""
        if isinstance(message, Commit):
            if message.next is None:
                return message
            following = self.near(message.next, replica)
            return message if following is message.next else msgspec.structs.replace(message, next=following)
        if isinstance(message, NewEpoch | Join | Prepare):
            epoch = self.near(message.epoch, replica)
            return message if epoch is message.epoch else msgspec.structs.replace(message, epoch=epoch)
        return message
