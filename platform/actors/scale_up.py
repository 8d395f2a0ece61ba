"""Members that are being added to a gang: placed, started and built while the existing ones continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from orchestray.platform.actors.death_cause import LOSSES, cause_of, last_line
from orchestray.platform.actors.member import Failure
from orchestray.platform.actors.slot import waiting
from orchestray.platform.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.platform.actors.placement import Place, Room
    from orchestray.platform.actors.slot import MemberSlot

_MOST_DEATHS = 3


class Growth:
    """A set of members that are being added, made by `Membership`; ends with `Membership.adopt` or with `cancel`.

    Attributes:
        room: places requested from the cluster for them.
        places: one place per member.
        slots: slots of the members, once there is room for them.
    """

    def __init__(
        self,
        room: Room,
        places: Sequence[Place],
        start: Callable[[Place], MemberSlot],
        give_up: Callable[[Growth], None],
    ) -> None:
        """Prepare the members; they start once `room` is ready.

        Args:
            room: places requested from the cluster.
            places: one place per member: those of `room`, and unused ones of the gang.
            start: starts the process of a member and makes it build its object.
            give_up: cancels the requested places and ends the started members.
        """
        self.room = room
        self.places = list(places)
        self.slots: list[MemberSlot] = []
        self._start = start
        self._give_up = give_up
        self._num_deaths = 0

    def is_ready(self) -> bool:
        """Return True if all new members are alive and have built their objects; never wait.

        A member that dies before it is adopted is started again, a few times.

        Raises:
            ClusterError: there was no room in time, or members keep dying.
            OrchestrayError: what a member reports that could not build its object.
        """
        if not self.slots:
            if not self.room.is_there():
                return False
            self.slots = [self._start(place) for place in self.places]
        built = [self._is_built(index) for index in range(len(self.slots))]  # each is checked: one may have died
        return all(built)

    def cancel(self) -> None:
        """Cancel the addition of these members."""
        self._give_up(self)

    def _is_built(self, index: int) -> bool:
        slot = self.slots[index]
        if not ray.wait([slot.hosting], timeout=0)[0]:
            return False
        if slot.end is None:
            waiting(slot)
        try:
            answer = ray.get(slot.hosting)
            if slot.is_dead:  # it died after it was built, while others were still building
                ray.get(slot.end)
        except LOSSES as error:
            self._num_deaths += 1
            if self._num_deaths > _MOST_DEATHS:
                raise ClusterError(f"A new worker died while it was started: {cause_of(error)}.") from error
            self.slots[index] = self._start(slot.place)
            return False
        except RayError as error:
            raise ClusterError(f"A new worker could not be started: {last_line(error)}") from error
        if isinstance(answer, Failure):
            raise answer.error
        return True
