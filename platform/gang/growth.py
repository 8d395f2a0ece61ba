"""Members on their way into a gang: placed, started and built while those that are there go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayActorError, RayError

from orchestray.platform.errors import ClusterError
from orchestray.platform.gang.causes import cause_of, last_line
from orchestray.platform.gang.member import Failure
from orchestray.platform.gang.seat import waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.platform.gang.placement import Place, Room
    from orchestray.platform.gang.seat import Seat

_MOST_DEATHS = 3


class Growth:
    """Made by `Gang.begin_growth`; ends with `Gang.adopt` or with `cancel`.

    Attributes:
        room: what was asked of the cluster for them.
        places: one a member.
        seats: the members, once there is room for them.
    """

    def __init__(
        self,
        room: Room,
        places: Sequence[Place],
        start: Callable[[Place], Seat],
        give_up: Callable[[Growth], None],
    ) -> None:
        """
        Args:
            room: see above.
            places: see above; those of `room`, and others that were there.
            start: starts the process of a member, and has it build its object.
            give_up: takes back what was asked for and started.
        """
        self.room = room
        self.places = list(places)
        self.seats: list[Seat] = []
        self._start = start
        self._give_up = give_up
        self._num_deaths = 0

    def is_ready(self) -> bool:
        """Whether all have built their objects and live; never waits.

        Who dies on the way, or while it waits to be adopted, is started again, a few times.

        Raises:
            ClusterError: there was no room in time, or they die again and again.
            OrchestrayError: what one of them says who could not build its object.
        """
        if not self.seats:
            if not self.room.is_there():
                return False
            self.seats = [self._start(place) for place in self.places]
        built = [self._is_built(index) for index in range(len(self.seats))]  # each is looked at: one may have died
        return all(built)

    def cancel(self) -> None:
        """They are not wanted any more."""
        self._give_up(self)

    def _is_built(self, index: int) -> bool:
        seat = self.seats[index]
        if not ray.wait([seat.hosting], timeout=0)[0]:
            return False
        if seat.end is None:
            waiting(seat)
        try:
            answer = ray.get(seat.hosting)
            if seat.is_dead:  # since it has built: others were waited for
                ray.get(seat.end)
        except RayActorError as error:
            self._num_deaths += 1
            if self._num_deaths > _MOST_DEATHS:
                raise ClusterError(f"A new worker died while it was started: {cause_of(error)}.") from error
            self.seats[index] = self._start(seat.place)
            return False
        except RayError as error:
            raise ClusterError(f"A new worker could not be started: {last_line(error)}") from error
        if isinstance(answer, Failure):
            raise answer.error
        return True
