"""What a serve config may hold. Rules between keys are in checks.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from orchestray.platform.config.base import AboveZero, AtLeastZero, Count, Flag, Positive, Section, Text
from orchestray.platform.config.schema import RunName

Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
Percentage = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=100)]


class ModelSection(Section):
    """One version of a model."""

    name: RunName
    """What it is called in requests; several versions of one name share its traffic."""
    run: Text
    """Run directory, or that of a search: then its best run."""
    version: Positive = 1
    """Number of the version."""
    traffic: Percentage | None = None
    """Per cent of the name's requests; 0: only those that name this version; null: an equal part of what is left."""
    shadow: Flag = False
    """It gets a copy of each request of the name that it takes, but for `/generate`; its answers are thrown away."""


class TlsSection(Section):
    """HTTPS, where both files are given."""

    certificate: Text | None = None
    """PEM file with the certificate (and its chain)."""
    key: Text | None = None
    """PEM file with its private key."""


class HttpSection(Section):
    """Where it listens."""

    host: Text = "127.0.0.1"
    """Address to listen on; 0.0.0.0: every one of this machine's."""
    port: Port = 8000
    """0: any that is free."""
    fronts: Positive = 1
    """Processes that take requests; 1: the command's own; more: on the cluster's nodes, behind Ray Serve's proxy."""
    proxy: Literal["auto", "haproxy", "python"] = "auto"
    """Ray Serve's, before several fronts: HAProxy answers more, and opens ports on every address; `auto`: Python's,
    unless RAY_SERVE_ENABLE_HA_PROXY=1 asks for the other, `host` is for other machines and `tls` is not set."""
    max_body_mb: AboveZero = 16.0
    """Megabytes of a request's body above which it is refused."""
    tls: TlsSection = TlsSection()
    """HTTPS."""
    read_timeout_s: AboveZero = 10.0
    """Seconds a client may take to send a request; a body that comes on has more. With one front."""
    timeout_ms: AboveZero | None = None
    """Milliseconds after which an answer is of no use, of requests that name no such time; null: none."""
    access_log: Flag = False
    """A line of JSON on stderr for each request."""
    tracing: Flag = False
    """OpenTelemetry spans, exported as the OTEL_* variables say: by OTLP, if they say nothing."""


class AuthSection(Section):
    """Who may ask."""

    tokens_file: Text | None = None
    """Lines of SHA-256 hashes of bearer tokens; the environment variable ORCHESTRAY_TOKEN sets one token more."""
    requests_per_s: AboveZero | None = None
    """Requests a second that each token may make; null: any number."""


class BatchingSection(Section):
    """How requests become batches."""

    policy: Literal["adaptive", "greedy", "fixed"] = "adaptive"
    """When a batch that is not full is run: `adaptive` finds out, `greedy` never waits, `fixed` waits `timeout_ms`."""
    max_batch_size: Positive = 32
    """Requests in one batch, at most."""
    timeout_ms: AtLeastZero | None = None
    """Of the policy `fixed`: how long the first request of a batch waits for others."""
    objective: Literal["mean", "tail", "throughput"] = "mean"
    """What the policy `adaptive` works for."""
    max_queue: Positive = 1024
    """Requests that may wait; more are refused."""
    run_timeout_s: AboveZero | None = 60.0
    """Seconds after which a batch, or a step of `/generate`, is taken to hang; null: never."""


class GenerationSection(Section):
    """Text that goes on from a prompt, of models that generate it."""

    max_tokens: Positive = 4096
    """Tokens that one request may ask for, at most."""
    max_prompt_bytes: Positive = 16384
    """Bytes of a prompt in UTF-8, at most; the model looks back at no more than its context."""


class Scaling(Section):
    """As many replicas as the load needs."""

    min: Count = 1
    """Replicas there are always; 0: none while nobody asks, so that the first request waits for one to start."""
    max: Positive = 4
    """Replicas, at most."""
    target_latency_ms: AboveZero = 100.0
    """Latency that requests should have on average, queueing included."""


class ServeResources(Section):
    """What one replica gets."""

    cpus_per_worker: AboveZero = 1.0
    """Cores; torch uses as many threads."""
    gpus_per_worker: AtLeastZero = 0.0
    """GPUs, or a part of one."""


class NetworkSection(Section):
    """How the processes of one replica share a model that is too large, or too slow, for one."""

    tensor: Positive = 1
    """Processes a layer is split over."""
    pipeline: Positive = 1
    """Processes the layers are spread over, one after the other."""
    memory_gb: AboveZero | None = None
    """Gigabytes that a process has for its part of the model: `pipeline` is raised to what that takes."""
    microbatches: Positive | None = None
    """Parts in which a batch goes through the stages; null: two a stage."""
    split: Literal["balanced", "equal"] | list[Text] = "balanced"
    """Where the layers are cut: see `strategy.network.split` of a training config."""
    plan: Literal["auto", "channels", "spatial", "branches", "one_weird_trick"] = "auto"
    """What the `tensor` processes split: see `strategy.network.plan`."""


class ComputeSection(Section):
    """How the model is computed."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: autocast; `float32`: the precision it was trained in."""
    compile: Flag = False
    """torch.compile, for a few sizes of batches that smaller ones are padded to."""
    quantize: Literal["int8"] | None = None
    """`int8`: linear layers compute with 8-bit integers, a quarter of the bytes; on the CPU, in one process."""
    network: NetworkSection | None = None
    """How the processes of a replica share the model; null: as those that trained it did."""


class ServeConfig(Section):
    """An HTTP endpoint."""

    name: RunName
    """Name of the endpoint: `--update` finds it by this."""
    models: tuple[ModelSection, ...]
    """What is served; the first is the default."""
    http: HttpSection = HttpSection()
    """Where it listens."""
    auth: AuthSection = AuthSection()
    """Who may ask."""
    batching: BatchingSection = BatchingSection()
    """How requests become batches."""
    generation: GenerationSection = GenerationSection()
    """What may be asked of models that generate text."""
    replicas: Positive | Scaling = 1
    """Processes that compute, of each version; 1: the front's own; or {min, max, target_latency_ms}."""
    resources: ServeResources = ServeResources()
    """What one replica gets."""
    compute: ComputeSection = ComputeSection()
    """How the model is computed."""

    @field_validator("models", mode="after")
    @classmethod
    def _has_a_model(cls, models: tuple[ModelSection, ...]) -> tuple[ModelSection, ...]:
        if not models:
            raise ValueError("must list one model at least")
        return models

    @property
    def in_process(self) -> bool:
        """Whether the models run in the process of the HTTP front."""
        return self.replicas == 1

    def traffic(self) -> dict[tuple[str, int], float]:
        """Per cent of its name's requests that each (name, version) answers; shadows answer none."""
        shares: dict[tuple[str, int], float] = {}
        for name in dict.fromkeys(model.name for model in self.models):
            answering = [model for model in self.models if model.name == name and not model.shadow]
            open_ones = [model for model in answering if model.traffic is None]
            left = 100.0 - sum(model.traffic or 0.0 for model in answering)
            for model in answering:
                shares[name, model.version] = left / len(open_ones) if model.traffic is None else model.traffic
        return shares

    def model_settings(self, model: ModelSection) -> dict[str, Any]:
        """Everything that the version's answers and speed depend on: if it is the same, so is the version."""
        return {
            "run": model.run,
            "batching": self.batching.model_dump(mode="json"),
            "replicas": self.replicas if isinstance(self.replicas, int) else self.replicas.model_dump(mode="json"),
            "resources": self.resources.model_dump(mode="json"),
            "compute": self.compute.model_dump(mode="json"),
        }
