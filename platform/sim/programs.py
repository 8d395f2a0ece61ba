"""Programs in virtual time: generators, or functions in threads of which exactly one runs at a time."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from orchestray.platform.comm.channel.base import ChannelTimeoutError, Handle, Result

if TYPE_CHECKING:
    from orchestray.platform.sim.virtual_time import Clock

Steps = Generator[Any, Any, Any]


class Promise(Future[Result]):
    """A future without locks, for programs of which one runs at a time: a simulation makes millions of them.

    Only methods defined here may be used, and not `concurrent.futures.wait`.
    """

    _progress: Literal["pending", "running", "cancelled", "done"] = "pending"
    _is_done = False
    _value: Any = None
    _error: BaseException | None = None
    _then: list[Callable[[Any], object]] | None = None

    def __init__(self) -> None:
        """Do not call the base class, which would make locks; the initial values are class attributes."""

    def done(self) -> bool:
        return self._is_done

    def cancel(self) -> bool:
        if self._progress == "pending":
            self._progress = "cancelled"
            self._is_done = True
        return self._progress == "cancelled"

    def set_running_or_notify_cancel(self) -> bool:
        if self._progress == "pending":
            self._progress = "running"
        return self._progress == "running"

    def set_result(self, result: Result) -> None:
        self._value = result
        self.succeed()

    def set_exception(self, exception: BaseException | None) -> None:
        self._error = exception
        self.succeed()

    def succeed(self) -> None:
        """Mark it as done with the value that was set; without one, its result is None."""
        self._progress = "done"
        self._is_done = True
        then, self._then = self._then, None
        for call in then or ():
            call(self)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        if self._is_done:
            fn(self)
        elif self._then is None:
            self._then = [fn]
        else:
            self._then.append(fn)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return CancelledError() if self._progress == "cancelled" else self._error

    def result(self, timeout: float | None = None) -> Result:
        error = self.exception()
        if error is not None:
            raise error
        value: Result = self._value
        return value


class Due(Promise[None]):
    """A promise that is done once the clock has reached a time. It needs an event only if a program waits for it."""

    def __init__(self, clock: Clock, at_s: float) -> None:
        self._clock = clock
        self._at_s = at_s

    def done(self) -> bool:
        return self._is_done or self._clock.now_s >= self._at_s

    def cancel(self) -> bool:
        return False  # time cannot be stopped

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        if self.done():
            fn(self)
            return
        if self._then is None:
            self._clock.at(self._at_s, self.succeed)
        super().add_done_callback(fn)


class VirtualHandle(Handle[Result]):
    """A handle whose waiting takes virtual time. A generator yields it; a function in a thread calls `wait`."""

    def __init__(self, future: Future[Result], waiting: str, timeout_s: float, clock: Clock) -> None:
        super().__init__(future, waiting, timeout_s)
        self._clock = clock

    def wait(self, timeout_s: float | None = None) -> Result:
        if not self.future.done():
            self._clock.block(self.within(self.timeout_s if timeout_s is None else timeout_s))
        return self.future.result(0)

    def within(self, timeout_s: float) -> Wait:
        """Limit a generator's wait: `yield handle.within(2.0)` raises ChannelTimeoutError after two virtual seconds."""
        return Wait((self,), timeout_s, alone=True)


@dataclass(slots=True)
class Wait:
    """The wait of a replica for all of `handles`, for at most `timeout_s`."""

    handles: tuple[VirtualHandle[Any], ...]
    timeout_s: float
    alone: bool

    @classmethod
    def of(cls, yielded: object) -> Wait:
        """Return the wait for a yielded handle, tuple or list of handles, or Wait; raise TypeError for others."""
        if isinstance(yielded, VirtualHandle):
            return cls((yielded,), yielded.timeout_s, alone=True)
        if isinstance(yielded, Wait):
            return yielded
        if isinstance(yielded, tuple | list) and all(isinstance(h, VirtualHandle) for h in yielded):
            return cls(tuple(yielded), min((h.timeout_s for h in yielded), default=math.inf), alone=False)
        raise TypeError(f"a replica yields the handles it waits for, got {yielded!r}")

    def missing(self) -> VirtualHandle[Any] | None:
        """Return the first handle that is not done."""
        for handle in self.handles:
            if not handle.future.done():
                return handle
        return None

    def result(self) -> Any:
        """Return the value for the replica, one result or a list of them; raise the first error among them."""
        if self.alone:
            return self.handles[0].future.result(0)
        return [handle.future.result(0) for handle in self.handles]


class SimulatedProgram(ABC):
    """A program in virtual time. After `Clock.run` it has `result` or `error`, `finished_s`, and `killed`."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished_s: float | None = None
        self.killed = False
        self._clock = clock
        self._wait: Wait | None = None
        self._wait_number = 0
        self._on_end: list[Callable[[SimulatedProgram], None]] = []

    @abstractmethod
    def advance(self, error: BaseException | None) -> None:
        """Run until the program waits or ends; an `error` is raised where it waits, instead of giving it a result."""

    def on_end(self, action: Callable[[SimulatedProgram], None]) -> None:
        """Call `action` when the program has ended in any way."""
        self._on_end.append(action)

    def kill(self) -> None:
        """End the program where it waits, without reporting an error."""
        if self.finished_s is None:
            self.killed = True
            self._clock.resume(self, Killed())

    def await_(self, wait: Wait) -> None:
        """Let the program wait for this from now on."""
        self._wait = wait
        self._wait_number += 1
        number = (
            self._wait_number
        )  # callbacks hold the number instead of the wait, which would make a cycle per message for the collector
        if wait.timeout_s < math.inf and wait.missing() is not None:
            why = f"nothing within {wait.timeout_s:g} s of virtual time"
            self._clock.at(self._clock.now_s + wait.timeout_s, lambda: self.time_out(number, why))
        self._check(number)

    def time_out(self, number: int | None, why: str) -> None:
        """Raise ChannelTimeoutError in the program if this wait (None: any) is its current one."""
        if self._wait is not None and number in (None, self._wait_number):
            missing = self._wait.missing()
            if missing is not None:
                self._clock.resume(self, ChannelTimeoutError(f"{missing.waiting}: {why}"))

    def resumed(self) -> None:
        """End the wait: the clock is about to call `advance`."""
        self._wait = None

    @property
    def waits(self) -> bool:
        """True if it has neither ended nor been resumed."""
        return self._wait is not None and self.finished_s is None

    def _check(self, number: int) -> None:
        if self._wait is None or number != self._wait_number:
            return  # it timed out, or was killed
        missing = self._wait.missing()
        if missing is None:
            self._clock.resume(self, None)
        else:
            missing.future.add_done_callback(lambda _: self._check(number))

    def _ended(self, result: Any, error: BaseException | None) -> None:
        self.result, self.finished_s = result, self._clock.now_s
        self.error = None if self.killed else error
        for action in self._on_end:
            action(self)


class GeneratorReplica(SimulatedProgram):
    """A generator that yields the handles it waits for."""

    def __init__(self, name: str, clock: Clock, steps: Steps) -> None:
        super().__init__(name, clock)
        self._steps = steps
        self._waited: Wait | None = None

    def advance(self, error: BaseException | None) -> None:
        waited, self._waited, given = self._waited, None, None
        if waited is not None and error is None:
            try:
                given = waited.result()
            except BaseException as failure:  # noqa: BLE001 - raised in the generator
                error = failure
        try:
            self._waited = Wait.of(self._steps.throw(error) if error is not None else self._steps.send(given))
        except StopIteration as end:
            self._ended(end.value, None)
        except BaseException as failure:  # noqa: BLE001 - data from here on: `run` raises it
            self._ended(None, failure)
        else:
            self.await_(self._waited)


class ThreadReplica(SimulatedProgram):
    """A function in a thread of its own, which runs only between `advance` and its next wait."""

    def __init__(self, name: str, clock: Clock, function: Callable[[], Any]) -> None:
        super().__init__(name, clock)
        self._function = function
        self._mine, self._clocks = threading.Lock(), threading.Lock()  # held while it is the other's turn
        self._mine.acquire()
        self._clocks.acquire()
        self._raise: BaseException | None = None
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"replica {name}", daemon=True)
        self._thread.start()

    def advance(self, error: BaseException | None) -> None:
        self._raise = error
        self._mine.release()
        self._clocks.acquire()
        if self._outcome is not None:
            self._thread.join()
            self._ended(*self._outcome)

    def park(self, wait: Wait) -> None:
        """Give the turn back until the wait ends; called in the program's thread."""
        self.await_(wait)
        self._clocks.release()
        self._take_turn()

    def _take_turn(self) -> None:
        self._mine.acquire()
        error, self._raise = self._raise, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            self._take_turn()
            self._outcome = (self._function(), None)
        except BaseException as failure:  # noqa: BLE001 - data from here on: `run` raises it
            self._outcome = (None, failure)
        self._clocks.release()


class Killed(BaseException):
    """Raised in a replica that is killed; not an Exception, so that error handlers do not keep it alive."""
