"""Text generation with continuous batching, and models that are divided over several processes to be served.

Generation: a `ModelVersion` whose model generates text has an `Engine` as its `generator` (`starting.add_generator`),
which steps the model in a thread of its own; `make_generate_router(registry)` is the route `POST /generate` for
`make_app(..., routers=[...])`. Large models: `starting.start_divided` makes a `ModelVersion` whose runners are gangs
(`ModelParallel`), each process of which holds a part of the model (`ForwardWorker`).
"""

from __future__ import annotations
