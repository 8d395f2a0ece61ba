"""Files of a run directory."""

from __future__ import annotations

from builder.reference.markdown import page, table

FILES = {
    "config.yaml": "Config with every default spelled out; feeding it back gives the same run.",
    "metrics.jsonl": "A line a step, and a line a validation: see [metrics](metrics.md).",
    "events.jsonl": "What happened and when: started, checkpoints, workers lost and replaced, finished.",
    "actors.json": "Processes of the run, with role, rank, process id and node.",
    "code.json": "Files of the task as they were when the run began, or last resumed.",
    "logs": "What each process printed, if anything: `worker-0.log`, ...",
    "checkpoints": "The last checkpoints, each with checksums, written aside and then renamed.",
    "model": "Trained weights as safetensors, and what it takes to build the model again.",
    "tensorboard": "The same metrics for TensorBoard.",
    "trackers": "How far each of `trackers` has been told, so that a resumed run goes on there.",
    "result.json": "How it ended: see [metrics](metrics.md#resultjson).",
    "timeline.json": "Last steps of a pipeline, action by action.",
    "schedule.json": "Hyper-parameters by step that the run followed (`orchestray train --replay`).",
    "stacks": "Python stacks of processes that hung.",
}
"""Maps each file or folder to its meaning."""


def run_page() -> str:
    """Return the page of the files."""
    rows = [[f"`{name}`" if "." in name else f"`{name}/`", text] for name, text in FILES.items()]
    introduction = (
        "Everything that a run leaves behind is in one directory, `runs/NAME`, in formats that any program reads. "
        "A file is there only with what it belongs to. `orchestray runs show NAME` reads them, and "
        "`orchestray.load_run` in Python."
    )
    return page("Run directory", introduction, table(["file", "holds"], rows))
