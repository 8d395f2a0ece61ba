"""Text generation with continuous batching.

A `ModelVersion` whose model generates text has an `Engine` as its `generator` (`starting.add_generator`), which steps
the model in a thread of its own. `make_generate_router(registry)` makes the route `POST /generate` for `make_app(...,
routers=[...])`. Models divided over several processes are served by `starting.start_divided`. It makes a `ModelVersion`
whose runners are gangs (`ModelParallel`), each process of which holds a part of the model (`ForwardWorker`).
"""

from __future__ import annotations
