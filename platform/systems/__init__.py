"""The systems, techniques and results of the field, and which of them work here."""

from orchestray.platform.systems.table import GROUPS, State, System, find_system, load_systems

__all__ = ["GROUPS", "State", "System", "find_system", "load_systems"]
