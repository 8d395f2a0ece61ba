"""Text generation with continuous batching, and models that are divided over several processes to be served.

How an endpoint uses it. Generation: where `can_generate(task)`, `load_engine(run, ...)` makes an `Engine` on the loop
of the HTTP front (it steps the model in a thread of its own; `await engine.close()` ends it), and
`app.include_router(make_generate_router({name: engine, ...}))` adds `POST /generate` to the application of
`orchestray.serving.http`; the mapping may change while it serves. Large models: `await ModelParallel.start(run,
network, ...)` takes the place of a `ServedModel`: it has its `signature`, and its `run` is what `Batcher.add_runner`
takes, with `replace` for when a process of it has died.
"""

from __future__ import annotations
