"""`orchestray bench`: a load generator for an endpoint."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestray.cli import options
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.files import dump_json, storage_errors

app = typer.Typer()

_EPILOG = """Examples:

orchestray bench http://127.0.0.1:8000

orchestray bench http://127.0.0.1:8000/predict --rate 200 --deadline-ms 100

orchestray bench http://127.0.0.1:8000/v2/models/digits --clients 8 --json

orchestray bench http://127.0.0.1:3000/any --body body.json --rates 10,50,100 --output results
"""


@app.command(epilog=_EPILOG)
def bench(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="The endpoint, or one path of it. What to send is taken from its /openapi.json or /v2 metadata.",
            show_default=False,
        ),
    ],
    *,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="Open loop: Poisson arrivals, N requests/s.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option("--clients", metavar="N", help="Closed loop: N clients that wait for their answers.")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            "--rates", metavar="N,N,...", help="Each of these rates in turn; default: rates up to what it can do."
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Recorded arrivals: the time of one a line, in s.")
    ] = None,
    burst: Annotated[
        float, typer.Option("--burst", metavar="N", help="With rates: requests come in bursts of N on average.")
    ] = 1.0,
    think_ms: Annotated[
        float, typer.Option("--think-ms", metavar="MS", help="With --clients: from an answer to the next request.")
    ] = 0.0,
    duration_s: Annotated[
        float | None,
        typer.Option("--duration-s", metavar="S", help="What is measured of each load.", show_default="10, of many 5"),
    ] = None,
    warm_up_s: Annotated[float, typer.Option("--warm-up-s", metavar="S", help="Sent before, and not counted.")] = 1.0,
    deadline_ms: Annotated[
        float | None, typer.Option("--deadline-ms", metavar="MS", help="Also count the answers within this time.")
    ] = None,
    tell_deadline: Annotated[
        bool, typer.Option("--tell-deadline", help="Send the deadline along, as X-Request-Timeout-Ms.")
    ] = False,
    body: Annotated[
        list[Path] | None,
        typer.Option("--body", metavar="FILE", help="What to send; several files are sent in turns."),
    ] = None,
    method: Annotated[str | None, typer.Option("--method", metavar="NAME", help="In place of POST.")] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME:VALUE", help="Sent with each request.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="TOKEN", envvar="ORCHESTRAY_TOKEN", help="Bearer token.", show_default=False),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Take any certificate.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", metavar="S", help="A request without an answer has failed after this time.")
    ] = 30.0,
    connections: Annotated[
        int, typer.Option("--connections", metavar="N", min=1, help="Open loop: connections at most.")
    ] = 1000,
    processes: Annotated[
        int | None,
        typer.Option("--processes", metavar="N", min=1, help="Of the load generator.", show_default="one for 4 cores"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the arrivals.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write bench.json and bench.svg there.")
    ] = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> None:
    """Put load on any HTTP endpoint and measure its latency.

    Latency counts from when a request was due, so a stall counts for every request that it would have delayed.

    Without a given load, finds the endpoint's capacity, and measures rates below and above it.
    """
    load = _load(rate, clients, rates, trace, burst, think_ms)
    swept = rate is None and clients is None and trace is None
    _check_numbers(duration_s, warm_up_s, deadline_ms, timeout_s, tell_deadline=tell_deadline)
    headers = _headers(header or [], token, deadline_ms if tell_deadline else None)
    if output is not None:
        with storage_errors(f"make the directory {output}"):  # first: results must not be lost for it
            output.mkdir(parents=True, exist_ok=True)
    # Imported here: it is slow to load, and mistakes in the arguments are reported before.
    from orchestray.loadtest.discover import find_target, probe
    from orchestray.loadtest.measure import measure
    from orchestray.loadtest.plan import Plan
    from orchestray.loadtest.session import Session

    target, source = find_target(
        url, body_files=body or [], method=method, headers=headers, verify=not insecure, timeout_s=timeout_s
    )
    probe(target, timeout_s=timeout_s)
    plan = Plan(
        target,
        load,
        duration_s=duration_s or (5.0 if swept else float(getattr(load, "duration_s", 10.0))),
        warm_up_s=warm_up_s,
        deadline_s=None if deadline_ms is None else deadline_ms / 1e3,
        timeout_s=timeout_s,
        max_connections=connections,
        seed=seed,
    )
    if not quiet:
        print(f"{plan.target.method} {plan.target.url}, {source}", file=sys.stderr)
    session = Session(plan, partial(measure, num_processes=processes), quiet=quiet)
    try:
        result = session.sweep(_rates(rates)) if swept else session.single()
    except KeyboardInterrupt:
        print("Interrupted: nothing was kept.", file=sys.stderr)
        raise typer.Exit(130) from None
    _finish(session, result, output, json_=json_)


def _finish(session: Any, result: dict[str, Any], output: Path | None, *, json_: bool) -> None:
    """Write and print the results; end the command with an error if nothing was answered."""
    if json_:
        print(dump_json(result))
    if output is not None:
        with storage_errors(f"write into {output}"):
            (output / "bench.json").write_text(dump_json(result, indent=1) + "\n", encoding="utf-8")
            (output / "bench.svg").write_text(session.picture(), encoding="utf-8")
        print(f"Written: {output / 'bench.json'}, {output / 'bench.svg'}", file=sys.stderr)
    session.check_answered()
    if session.is_interrupted:
        print("Interrupted: these are the results until then.", file=sys.stderr)
        raise typer.Exit(130)


def _load(
    rate: float | None, clients: int | None, rates: str | None, trace: Path | None, burst: float, think_ms: float
) -> Any:
    """Return the requested load; for a sweep, one whose rate is a placeholder.

    Raises:
        ConfigError: lists every problem.
    """
    from orchestray.loadtest import loads

    asked = {"--rate": rate, "--clients": clients, "--rates": rates, "--trace": trace}
    given = [name for name, value in asked.items() if value is not None]
    problems = [f"{' and '.join(given)}: one load at a time"] if len(given) > 1 else []
    if rate is not None and not 0 < rate < math.inf:
        problems.append(f"--rate: must be > 0 requests/s, got {rate:g}")
    if clients is not None and clients < 1:
        problems.append(f"--clients: must be >= 1, got {clients}")
    if not 1 <= burst < math.inf:
        problems.append(f"--burst: must be >= 1 requests, got {burst:g}")
    if burst > 1 and (clients is not None or trace is not None):
        problems.append("--burst: goes with rates, not with --clients or --trace")
    if not 0 <= think_ms < math.inf:
        problems.append(f"--think-ms: must be >= 0, got {think_ms:g}")
    if think_ms > 0 and clients is None:
        problems.append("--think-ms: goes with --clients")
    if rates is not None:
        try:
            _rates(rates)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    if trace is not None:
        return loads.read_trace(trace)
    if clients is not None:
        return loads.ClosedLoop(clients, think_ms / 1e3)
    return loads.OpenLoop(rate or 1.0, burst)


def _rates(text: str | None) -> list[float]:
    """Return the numbers of `--rates`; none if it was not given."""
    if text is None:
        return []
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate < math.inf for rate in found):
        raise ConfigError(f"--rates: must be numbers > 0 with commas between, as in 50,100,200, got {text!r}")
    return found


def _check_numbers(
    duration_s: float | None, warm_up_s: float, deadline_ms: float | None, timeout_s: float, *, tell_deadline: bool
) -> None:
    problems = []
    if duration_s is not None and not 0 < duration_s < math.inf:
        problems.append(f"--duration-s: must be > 0, got {duration_s:g}")
    if not 0 <= warm_up_s < math.inf:
        problems.append(f"--warm-up-s: must be >= 0, got {warm_up_s:g}")
    if deadline_ms is not None and not 0 < deadline_ms < math.inf:
        problems.append(f"--deadline-ms: must be > 0, got {deadline_ms:g}")
    if tell_deadline and deadline_ms is None:
        problems.append("--tell-deadline: which? Give it with --deadline-ms")
    if not 0 < timeout_s < math.inf:
        problems.append(f"--timeout-s: must be > 0, got {timeout_s:g}")
    if problems:
        raise ConfigError(problems)


def _headers(lines: list[str], token: str | None, deadline_ms: float | None) -> list[tuple[str, str]]:
    found = []
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.strip(), value.strip()
        if not colon or not name or not line.isascii() or not line.isprintable() or " " in name:
            raise ConfigError(f"--header: must be NAME:VALUE in plain ASCII, got {line!r}")
        found.append((name, value))
    if token:
        if not token.isascii() or not token.isprintable():
            raise ConfigError("--token: has characters that no header can carry")
        found.append(("Authorization", f"Bearer {token}"))
    if deadline_ms is not None:
        found.append(("X-Request-Timeout-Ms", f"{deadline_ms:g}"))
    return found
