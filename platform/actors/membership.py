"""The changes of a gang's members while it works: it grows, it shrinks, and members move to other nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.actors.placement import Place, Room, give_back
from orchestray.platform.actors.scale_up import Growth
from orchestray.platform.actors.slot import MemberSlot, end

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.platform.actors.gang import Gang


class Membership:
    """The members that come to a gang and leave it, and their places.

    Attributes:
        growth: members that are being added; None: there are none.
    """

    def __init__(self, gang: Gang, neighbours: int, notify: Callable[[str], None]) -> None:
        """
        Args:
            gang: the gang, whose slots and shape are changed.
            neighbours: members that share a place.
            notify: called with a warning if new members get no CPU of their own.
        """
        self.growth: Growth | None = None
        self._gang, self._neighbours, self._notify = gang, neighbours, notify
        self._move: Growth | None = None
        """Members that will take over ranks of others, on other nodes."""
        self._unused: list[Place] = []
        """Places of removed members in the first placement group, which is kept until the gang ends."""
        self._added: list[Place] = []
        """Places of members that were added later, each in a placement group of its own."""

    @property
    def joining(self) -> list[MemberSlot]:
        """Slots of members that are not part of the gang yet."""
        return [slot for growth in self._growths for slot in growth.slots]

    @property
    def _growths(self) -> list[Growth]:
        return [growth for growth in (self.growth, self._move) if growth is not None]

    def begin_growth(self, num_members: int, target: str, *arguments: Any) -> Growth:
        """Start new members while the others continue; `adopt` makes them part of the gang.

        Args:
            num_members: number of members to add; a multiple of the neighbours per place.
            target: import path of the object that the new members build, as in `Gang.host`.
            *arguments: passed to `target`.

        Raises:
            ClusterError: the cluster does not have that many resources.
        """
        num_places = num_members // self._neighbours
        left = [place for place in self._unused if place.capacity == self._neighbours][:num_places]
        missing = (num_places - len(left)) * self._neighbours
        room = Room(self._gang.cluster, self._gang.shape, missing, self._neighbours, self._notify)
        self._unused = [place for place in self._unused if place not in left]
        places = [place for place in [*left, *room.places] for _ in range(self._neighbours)]
        self.growth = Growth(room, places, lambda place: self._gang.start(place, (target, *arguments)), self._give_up)
        return self.growth

    def adopt(self) -> None:
        """Add the new members, which must be ready, with the ranks after the existing ones."""
        growth, self.growth = self.growth, None
        assert growth is not None
        self._added += growth.room.places
        self._gang.slots += growth.slots
        self._gang.shape = replace(self._gang.shape, size=len(self._gang.slots))

    def begin_move(self, num_members: int, target: str, *arguments: Any) -> Growth:
        """Start members that will take over ranks of others elsewhere, while those go on; see `take_over`.

        Args:
            num_members: number of members to move; a multiple of the neighbours per place.
            target: import path of the object that the new members build, as in `Gang.host`.
            *arguments: passed to `target`.

        Raises:
            ClusterError: the cluster does not have that many resources.
        """
        room = Room(self._gang.cluster, self._gang.shape, num_members, self._neighbours, self._notify)
        places = [place for place in room.places for _ in range(self._neighbours)]
        self._move = Growth(room, places, lambda place: self._gang.start(place, (target, *arguments)), self._stay)
        return self._move

    def take_over(self, ranks: Sequence[int]) -> None:
        """Give these ranks to the members of `begin_move`, which must be ready; those that had them end."""
        move, self._move = self._move, None
        assert move is not None
        before = [self._gang.slots[rank] for rank in ranks]
        for rank, slot in zip(ranks, move.slots, strict=True):
            self._gang.slots[rank] = slot
        self._added += move.room.places
        end([slot.actor for slot in before])
        # Other places on such a node are left alone, as nobody is to be sent there.
        gone = [slot.place for slot in before if slot.place in self._added]
        give_back(gone)
        self._added = [place for place in self._added if place not in gone]

    def _stay(self, move: Growth) -> None:
        """Cancel a move."""
        self._move = None
        end([slot.actor for slot in move.slots])
        move.room.give_back()

    def shrink(self, size: int) -> None:
        """End the members of the last ranks and return their places, so that `size` members remain."""
        leaving = self._gang.slots[size:]
        del self._gang.slots[size:]
        self._gang.shape = replace(self._gang.shape, size=size)
        end([slot.actor for slot in leaving])
        self._leave([slot.place for slot in leaving])

    def _give_up(self, growth: Growth) -> None:
        """Cancel the members that are being added."""
        self.growth = None
        end([slot.actor for slot in growth.slots])
        growth.room.give_back()
        self._leave([place for place in growth.places if place not in growth.room.places])

    def _leave(self, places: Sequence[Place]) -> None:
        """Release places that nobody uses; keep those of the first placement group for members added later."""
        taken = self._gang.places
        free = [place for place in dict.fromkeys(places) if place not in taken]
        self._unused += [place for place in free if place not in self._added]
        give_back([place for place in free if place in self._added])
        self._added = [place for place in self._added if place not in free]

    def close(self) -> None:
        """Release the places of all members that were added later; their processes have ended."""
        places = self._added + [place for growth in self._growths for place in growth.room.places]
        self.growth = self._move = None
        give_back(places)
