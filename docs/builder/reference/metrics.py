"""Names of what a run and an endpoint report, with their meanings."""

from __future__ import annotations

from builder.reference.http import endpoint_metrics
from builder.reference.markdown import page, table

LINE = {
    "step": ("all", "Number of the step, from 1."),
    "epoch": ("all", "Number of the epoch, from 1."),
    "time_s": ("all", "Seconds since the run began, all its attempts together."),
    "loss": ("all", "Mean loss over the samples of the step's batch; of a validation, over the validation samples."),
    "split": ("validations", "`validation`: the line is that of a validation, with the task's metrics."),
    "lr": ("all", "Learning rate of the step."),
    "samples_per_s": ("all", "Samples of the batch over the seconds of the step."),
    "bytes_sent": ("all", "Bytes that all processes sent each other for the step."),
    "batch_samples": ("`train.batch_schedule`", "Samples of the step's batch."),
    "grad_norm": ("`train.grad_clip`, solvers", "Norm of the whole gradient, before it is clipped."),
    "gradient_variance": ("`train.noise_scale`", "Variance of the gradient of a batch, summed over all parameters."),
    "noise_scale": (
        "`train.noise_scale`",
        "Gradient noise scale: samples beyond which a larger batch helps little.",
    ),
    "critical_batch": ("`train.noise_scale`", "Mean noise scale over the progress of the run, in samples."),
    "inverse_age": ("`kfac`", "Age of the inverses in use, in steps."),
    "staleness": (
        "parameter servers, PipeDream",
        "Most updates between the read of a parameter and its gradient's write.",
    ),
    "bubble": ("pipelines", "Part of the workers' time in which no stage computed, since the last line with it."),
    "disagreement": (
        "`averaging`, `elastic_averaging`, `gossip`",
        "Norm of the first replica's distance from the mean or the center; under gossip an estimate.",
    ),
    "compression_error": ("`strategy.compression`", "Norm of what the first worker has not sent yet (error feedback)."),
    "sparsity": ("`topk`, `threshold`, `dgc`", "Part of the gradient's values that the first worker does not send."),
    "evaluations": ("`train.solver`", "Evaluations of the loss that the step took."),
    "step_length": ("`train.solver`", "Length of the step along its direction."),
    "damping": ("`newton`, `levenberg_marquardt`", "What is added to the curvature."),
    "cg_iterations": ("`hessian_free`", "Iterations of conjugate gradients."),
    "curvature": ("`neumann`", "Largest eigenvalue of the curvature along the gradient."),
    "anchor_age": ("`svrg`, `stochastic_lbfgs`", "Steps since the weights became the anchor."),
    "pairs": ("`stochastic_lbfgs`", "Pairs of curvature that the step was made with."),
}
"""Maps each name of a line of metrics.jsonl to when it is there, and to its meaning."""
RESULT = {
    "status": "`succeeded`, `failed` or `interrupted`.",
    "steps": "Steps that were made.",
    "epochs": "Epochs that were made; a part of one counts as a fraction.",
    "seconds": "Seconds from the command's start to the end, all attempts together.",
    "time_to_first_step_s": "Seconds until the first step was made.",
    "samples_per_s": "Training samples per second of training.",
    "goodput": "Part of the training's time in which steps were made that counted, from 0 to 1.",
    "final": "Loss and metrics at the end: of the last epoch (`train`), and of the last validation.",
    "bytes": "Bytes that all processes `sent` each other; `dense`: without compression; `links`: between stages.",
    "staleness": "`max`, `mean` and `histogram` of updates between read and write; null where none is possible.",
    "bubble": "Part of the workers' time in a pipeline in which no stage computed; null without a pipeline.",
    "memory": "`peak_bytes` of each process, and `peak_activation_bytes` of each worker.",
    "restarts": "How often lost workers were replaced.",
    "stopped_by": "What ended the run early: `until`, `early_stopping`, `time_limit`; null: nothing did.",
    "error": "Sentence that says what ended a failed run; null otherwise.",
    "versions": "Versions of Python, orchestray, torch, Ray, NumPy and pyarrow.",
    "parts": "Classes that carried out the run, as found on the live objects of its processes.",
    "reports": "What some of these objects measured of their own work, by class: each object's, process by process.",
    "arithmetic": "How torch computed on the first worker: determinism, precision of products, TF32.",
    "workers": "Of each worker: `shares` and `samples` computed, in `passes`, `busy_s`, `waited_s` for the others, and "
    "`starved_s` for samples that were not read yet. "
    "`order` is a checksum of its samples: two runs with the same one had the same samples in the same order.",
    "initial": "Before the first step: weights `drawn` (`train.init`), tensors `loaded`, parameters `frozen`.",
    "busy_s": "Seconds in which each worker of a pipeline computed.",
    "best": "Step, metric and value of the best checkpoint (`checkpoint.best`).",
    "predicted": "What `orchestray plan` had predicted for the config.",
    "batch": "Sizes of the batches (`train.batch_schedule`).",
    "lr": "Learning rate after scaling (`train.lr_scaling`).",
    "exchange": "What the exchange says of itself: graph, algorithm, buckets, or how each layer is sent.",
    "bytes_across_groups": "Bytes between leaf servers and shards (`groups`).",
    "bytes_replicated": "Bytes that servers sent to their copies, over connections of their own (`replicas`).",
    "dropped_copies": "Shares that two workers computed (`backup_workers`).",
    "updates": "Updates of the shared parameters (`transport: shared_memory`).",
    "lost_updates": "Updates that may have been lost (`transport: shared_memory`).",
    "read_retries": "Reads of data that were tried again.",
    "averaged": "Steps whose weights were averaged (`orchestray runs average`).",
    "compressed": "What `orchestray compress` did in each stage.",
    "tally": "Of a search, what its method counted: generations, tournaments, moves, proposals by its model, `alphas`.",
}
"""Maps each key of result.json to its meaning."""


def metrics_page() -> str:
    """Return the page of all names."""
    lines = ["## `metrics.jsonl`", "", "A line a step, and a line a validation.", ""]
    lines += table(["name", "there with", "meaning"], [[f"`{name}`", *entry] for name, entry in LINE.items()])
    lines += [
        "Validation lines also have what the task's `metrics` returns, and `members.<i>.<metric>` under `independent`.",
        "",
        "## `result.json`",
        "",
        "How a run ended. A key stands there only with what it belongs to.",
        "",
        *table(["key", "meaning"], [[f"`{name}`", text] for name, text in RESULT.items()]),
        "## `/metrics`",
        "",
        "Prometheus metrics of an endpoint. All but the first have the labels `model` and `version`.",
        "",
        *endpoint_metrics(),
    ]
    introduction = "What a run writes into `metrics.jsonl` and `result.json`, and what an endpoint shows at `/metrics`."
    return page("Metrics", introduction, lines)
