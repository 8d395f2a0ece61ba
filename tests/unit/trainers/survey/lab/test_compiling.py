"""Graphs that are compiled give the results of torch's operators; without a compiler a sentence says so."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.trainers.survey.lab.compiling import Chain, Graph, Recurrence, compiled, num_calls
from support.cli import orchestray_here

SMALL = {"chain": Graph(Chain, (8, 64))}


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Yield the folder for temporary files while the compiler leaves out what takes longer than the graph itself."""
    from torch._inductor import config

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with config.patch({"cpp.vec_isa_ok": False}):  # a trial of each vector extension
        yield tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch's own
def test_a_compiled_graph_has_the_output_of_torch_s_operators_in_one_kernel_and_its_times_are_compared(
    scratch: Path,
) -> None:
    if shutil.which("g++") is None:  # a machine without a compiler says so, and has nothing to compare
        with pytest.raises(ConfigError, match=r"no compiler 'g\+\+' here"):
            compiled(1, SMALL)
        return
    exhibit = compiled(3, SMALL)
    rows: list[list[Any]] = [list(row) for row in exhibit.rows]
    ((name, calls, kernels, eager_ms, compiled_ms, ratio, compile_s, off),) = rows
    assert (name, calls, kernels) == ("chain", 9, 1)
    assert off < 1e-5
    assert ratio == pytest.approx(eager_ms / compiled_ms)
    assert compile_s * 1e3 > compiled_ms
    assert exhibit.findings[0].startswith(f"chain: 9 calls become 1; compiled it is {ratio:.2g} times as fast")
    assert not [entry for entry in scratch.iterdir() if entry.is_dir()]  # what was made is removed


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch's own
def test_a_compiler_that_fails_is_named(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    compiler = scratch / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'g++ 12'\necho $* | grep -q version || exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with (
        config.patch({"cpp.cxx": (None, str(compiler))}),
        pytest.raises(OrchestrayError, match=r"broken-compiler' did not compile what torch\.compile made"),
    ):
        compiled(1, {"chain": Graph(Chain, (8, 48))})  # another one: libraries stay loaded


def test_a_compiler_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused = orchestray_here("lab", "compiled")
    assert refused.returncode == 2
    assert "there is no compiler 'no-such-compiler' here" in " ".join(refused.stderr.split())


def test_operators_inside_others_are_not_counted() -> None:
    x = torch.ones(3, 4)
    layer = nn.Linear(4, 2)
    assert num_calls(lambda: x) == 0
    assert num_calls(lambda: layer(x)) == 1
    assert num_calls(lambda: torch.tanh(layer(x)) + 1) == 3


def test_the_written_out_steps_are_an_lstm_s() -> None:
    torch.manual_seed(0)
    written, torch_s, x = Recurrence(6), nn.LSTM(6, 6), torch.randn(5, 3, 6)
    order = [1, 0, 2, 3]  # keep, write, new, show; torch's write is the first
    with torch.no_grad():
        weights = {
            name: torch.cat([each.chunk(4)[place] for place in order]) for name, each in torch_s.named_parameters()
        }
        written.inputs.weight.copy_(weights["weight_ih_l0"])
        written.states.weight.copy_(weights["weight_hh_l0"])
        written.inputs.bias.copy_(weights["bias_ih_l0"] + weights["bias_hh_l0"])
        torch.testing.assert_close(written(x), torch_s(x)[0][-1])
