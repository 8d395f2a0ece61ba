"""Replicas as threads of one process, over real gloo connections."""

from __future__ import annotations

from orchestray.platform.comm.thread_group import TIMEOUT_S, connected_threads, run_members

__all__ = ["TIMEOUT_S", "make_gloo_threads", "run_replicas"]

make_gloo_threads = connected_threads
run_replicas = run_members
