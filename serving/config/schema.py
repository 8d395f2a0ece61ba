"""The schema of a serve config. Rules between keys are in checks.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from orchestray.platform.config.base import AboveZero, AtLeastZero, Count, Flag, Positive, Section, Text, text_like
from orchestray.serving.batching.policies import POLICIES
from orchestray.trainers.config.schema import RunName

if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]

Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
RootPath = Annotated[
    str,
    text_like(
        r"^(/[A-Za-z0-9._~-]{1,64}){1,16}$",
        "a path such as /models/digits: parts of letters, digits, '.', '_', '~' and '-', and no / at its end",
    ),
]
Percentage = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=100)]


class ModelSection(Section):
    """One version of a model."""

    name: RunName
    """Name of the model in requests; several versions of one name share its traffic."""
    run: Text
    """Run directory; or directory of a search, whose best run is then served; or `file.py:Class` with `predict`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a `Class`."""
    version: Positive = 1
    """Number of the version."""
    traffic: Percentage | None = None
    """Per cent of the name's requests; 0: only those that name this version; null: an equal share of the rest."""
    shadow: Flag = False
    """True for a version whose answers are discarded.

    It gets a copy of each of the name's requests that it accepts, except `/generate`.
    """


class TlsSection(Section):
    """HTTPS, if both files are given."""

    certificate: Text | None = None
    """PEM file with the certificate (and its chain)."""
    key: Text | None = None
    """PEM file with its private key."""


class HttpSection(Section):
    """The HTTP server."""

    host: Text = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all addresses of this machine."""
    port: Port = 8000
    """Port to listen on; 0: any free one."""
    max_body_mb: AboveZero = 16.0
    """Largest body of a request, in megabytes."""
    tls: TlsSection = TlsSection()
    """HTTPS."""
    read_timeout_s: AboveZero = 10.0
    """Seconds in which a client must send a request; a body that keeps coming has more."""
    timeout_ms: AboveZero | None = None
    """Milliseconds until the deadline of requests that set none; null: no deadline."""
    cors_origins: tuple[Text, ...] = ()
    """Origins whose pages may ask from a browser, such as `https://example.org`; `*`: any. None by default."""
    root_path: RootPath | None = None
    """Prefix under which a proxy shows the endpoint, such as `/models/digits`; null: as `X-Forwarded-Prefix` says."""
    access_log: Flag = False
    """True for a line of JSON on stderr for each request."""
    tracing: Flag = False
    """True for OpenTelemetry spans, exported as the OTEL_* variables say; default: by OTLP."""


class AuthSection(Section):
    """Access to the endpoint."""

    tokens_file: Text | None = None
    """File with lines of SHA-256 hashes of bearer tokens; the environment variable ORCHESTRAY_TOKEN adds one token."""
    requests_per_s: AboveZero | None = None
    """Requests a second that each token may make; null: unlimited."""


class BatchingSection(Section):
    """Batching of requests."""

    policy: PolicyName = "adaptive"
    """Rule for a batch that is not full: `adaptive` learns the wait, `greedy` has none, `fixed` waits `timeout_ms`, and
    `polled` that long from when a replica is free."""
    max_batch_size: Positive = 32
    """Largest number of requests in one batch."""
    timeout_ms: AtLeastZero | None = None
    """Milliseconds that the first request of a batch waits for others, with the policies `fixed` and `polled`."""
    objective: Literal["mean", "tail", "throughput"] = "mean"
    """Objective of the policy `adaptive`."""
    max_queue: Positive = 1024
    """Largest number of waiting requests; more are refused. A request has at most as many samples."""
    run_timeout_s: AboveZero | None = 60.0
    """Seconds after which a batch, or a step of `/generate`, is considered hung; null: never."""


class GenerationSection(Section):
    """Text generation from a prompt, for models that support it."""

    max_tokens: Positive = 4096
    """Largest number of tokens that one request may ask for."""
    max_prompt_bytes: Positive = 16384
    """Largest prompt in bytes of UTF-8; the model looks back at no more than its context."""


class Scaling(Section):
    """Autoscaling: the number of replicas follows the load."""

    min: Count = 1
    """Smallest number of replicas; 0: none without requests, so that the first request waits for one to start."""
    max: Positive = 4
    """Largest number of replicas."""
    target_latency_ms: AboveZero = 100.0
    """Mean latency to aim for, queueing included."""


class ServeResources(Section):
    """Resources of one replica."""

    cpus_per_worker: AboveZero = 1.0
    """CPU cores; torch uses as many threads."""
    gpus_per_worker: AtLeastZero = 0.0
    """GPUs, or a fraction of one, of whose memory a replica then takes no more than that."""


class NetworkSection(Section):
    """Division of a model that is too large, or too slow, for one process over the processes of a replica."""

    tensor: Positive = 1
    """Number of processes over which each layer is split."""
    pipeline: Positive = 1
    """Number of pipeline stages, each of consecutive layers on its own processes."""
    memory_gb: AboveZero | None = None
    """Gigabytes that a process has for its part of the model: `pipeline` is raised to the stages that this needs."""
    microbatches: Positive | None = None
    """Number of micro-batches in which a batch passes the stages; null: two per stage."""
    split: Literal["balanced", "equal"] | list[Text] = "balanced"
    """Boundaries of the stages: see `strategy.network.split` of a training config."""
    plan: Literal["auto", "channels", "spatial", "branches", "one_weird_trick"] = "auto"
    """Way in which the `tensor` processes split layers: see `strategy.network.plan`."""


class ComputeSection(Section):
    """Computation of the model."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: autocast; `float32`: the precision it was trained in."""
    compile: Flag = False
    """True for torch.compile, with a few batch sizes to which smaller batches are padded."""
    cuda_graphs: Flag | None = None
    """True to launch batches of those sizes as CUDA graphs; for GPUs. null: as `compile`."""
    pad_to: list[Positive] | None = None
    """Sizes of batches for `compile` and `cuda_graphs`, to which `batching.max_batch_size` is added; null: powers of
    two and that."""
    quantize: Literal["int8"] | None = None
    """`int8`: linear layers compute with 8-bit integers, a quarter of the bytes; on the CPU, in one process."""
    pad_to_multiple: Positive | None = None
    """Number that divides the size of every batch, as units for short numbers want it: 8 for half precision and 16 for
    int8 on tensor cores, 128 on a TPU; smaller batches are padded. null: batches have the size that they have."""
    network: NetworkSection | None = None
    """Division of the model over the processes of a replica; null: as in training."""


class RollbackSection(Section):
    """Bounds on the versions that `--update` brings: one that breaks a bound is taken back, with all of the change."""

    error_rate: Percentage | None = None
    """Per cent of a new version's requests that may fail with a 5xx status; null: any."""
    p99_ms: AboveZero | None = None
    """Bound of a new version's latency in milliseconds, which 99 % of its requests must keep; null: none."""
    watch_s: AboveZero = 60.0
    """Seconds for which new versions are watched; the versions that they replace stay loaded."""


class UpdateSection(Section):
    """Changes of the running endpoint by `--update`."""

    rollback: RollbackSection | None = None
    """Bounds that take a new version back; null: only another `--update` does."""
    free_first: Flag = False
    """True to end the versions that a change leaves out before new ones are loaded, on a GPU that has no memory for
    both; their requests meanwhile get a 503 with the time to retry."""


class ServeConfig(Section):
    """An HTTP endpoint."""

    name: RunName = "endpoint"
    """Name of the endpoint, by which `--update` finds it; default: the name of the config's file."""
    models: tuple[ModelSection, ...]
    """Models that are served; the first is the default."""
    http: HttpSection = HttpSection()
    """HTTP server."""
    auth: AuthSection = AuthSection()
    """Access to the endpoint."""
    batching: BatchingSection = BatchingSection()
    """Batching of requests."""
    generation: GenerationSection = GenerationSection()
    """Limits of text generation."""
    replicas: Positive | Scaling = 1
    """Processes that compute, per version; 1: the ingress's own; or {min, max, target_latency_ms}."""
    resources: ServeResources = ServeResources()
    """Resources of one replica."""
    compute: ComputeSection = ComputeSection()
    """Computation of the model."""
    update: UpdateSection = UpdateSection()
    """Changes by `--update`."""

    @field_validator("models", mode="after")
    @classmethod
    def _has_a_model(cls, models: tuple[ModelSection, ...]) -> tuple[ModelSection, ...]:
        if not models:
            raise ValueError("must list one model at least")
        return models

    @property
    def in_process(self) -> bool:
        """True if the models run in the process of the ingress."""
        return self.replicas == 1

    def traffic(self) -> dict[tuple[str, int], float]:
        """Return the per cent of its name's requests that each (name, version) answers; shadows answer none."""
        shares: dict[tuple[str, int], float] = {}
        for name in dict.fromkeys(model.name for model in self.models):
            answering = [model for model in self.models if model.name == name and not model.shadow]
            open_ones = [model for model in answering if model.traffic is None]
            left = 100.0 - sum(model.traffic or 0.0 for model in answering)
            for model in answering:
                shares[name, model.version] = left / len(open_ones) if model.traffic is None else model.traffic
        return shares

    def model_settings(self, model: ModelSection) -> dict[str, Any]:
        """Return all settings that determine a version's answers and speed, and so its identity."""
        return {
            "run": model.run,
            **({"arguments": model.arguments} if model.arguments else {}),
            "batching": self.batching.model_dump(mode="json"),
            "replicas": self.replicas if isinstance(self.replicas, int) else self.replicas.model_dump(mode="json"),
            "resources": self.resources.model_dump(mode="json"),
            "compute": self.compute.model_dump(mode="json"),
        }
