"""All-reduce algorithms of Ben-Nun and Hoefler's survey: schedules as data, their costs, and their execution."""

from __future__ import annotations

if __name__ != "orchestray.platform.comm.allreduce":
    raise ImportError("import orchestray.platform.comm.allreduce, not a copy of it under another name")

__all__: list[str] = []
