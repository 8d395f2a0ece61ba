"""CHOCO: gossip that sends what has changed, in a code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.sync.compressed.compressed_gossip import CompressedGossip
from orchestray.trainers.sync.factory import make_exchange
from orchestray.trainers.sync.local.mixing import Mixer
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.threads import run_replicas
from support.training import digits, few_digits, furthest, same_bits

STAR = {"edges": [(0, 1), (0, 2), (0, 3)]}
CODES: list[dict[str, Any]] = [
    {"type": "qsgd", "bits": 4},
    {"type": "terngrad"},
    {"type": "onebit"},
    {"type": "topk", "ratio": 0.1},
]
LOSSLESS = {"type": "topk", "ratio": 1.0}


def name_of(code: Any) -> str:
    return str(code["type"]) if isinstance(code, dict) and "type" in code else str(code)


class Two(nn.Module):
    """A model of a matrix and a vector, all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(16, 9, dtype=torch.float64))
        self.vector = nn.Parameter(torch.zeros(21, dtype=torch.float64))

    def values(self) -> Tensor:
        return torch.cat([self.matrix.detach().reshape(-1), self.vector.detach()])

    @torch.no_grad()
    def move(self, by: np.ndarray) -> None:
        moved = torch.tensor(by)
        self.matrix += moved[:144].view(16, 9)
        self.vector += moved[144:]


def mixed(size: int, steps: int, code: dict[str, Any], **gossip: Any) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """Move replicas once, at the first step, then only mix; return their places after every step, and what was sent."""
    moves = np.random.default_rng(size).normal(size=(size, 165))

    def run(collective: Collective) -> tuple[np.ndarray, list[tuple[int, int]]]:
        model, exchange = Two(), CompressedGossip(code, **gossip)
        exchange.attach(model, collective)
        rows, sent = [], []
        for step in range(1, steps + 1):
            before = collective.own_bytes_sent
            exchange.before_step(step)
            exchange.finish([])
            if step == 1:
                model.move(moves[collective.rank])
            exchange.after_step(step)
            rows.append(model.values().numpy())
            sent.append((collective.own_bytes_sent - before, collective.own_bytes_sent + exchange.bytes_saved))
        exchange.detach()
        return np.stack(rows), sent

    found = run_replicas(size, run)
    return moves, np.stack([rows for rows, _ in found]), [sent for _, sent in found]


@pytest.mark.parametrize(
    ("code", "graph"), [(CODES[0], STAR), (CODES[1], "ring"), (CODES[2], STAR), (CODES[3], "complete")], ids=name_of
)
def test_the_mean_is_kept_and_the_disagreement_goes_to_zero(graph: Any, code: dict[str, Any]) -> None:
    start, rows, _ = mixed(4, 60, code, graph=graph)
    means = rows.mean(axis=0)
    assert np.abs(means - start.mean(axis=0)).max() <= 1e-12
    spread = np.sqrt(((rows - means) ** 2).sum(axis=(0, 2)))
    begun = np.sqrt(((start - start.mean(axis=0)) ** 2).sum())
    assert spread[-1] < 0.1 * begun
    assert spread[-1] < 0.5 * spread[29] or spread[29] < 1e-12


@pytest.mark.parametrize("graph", ["ring", STAR], ids=str)
def test_a_code_that_loses_nothing_mixes_as_uncompressed_gossip(graph: Any) -> None:
    start, rows, _ = mixed(4, 6, LOSSLESS, graph=graph)
    matrix, expected = Mixer(4, graph).matrix(1), start
    for step in range(6):
        expected = matrix @ expected
        np.testing.assert_allclose(rows[:, step], expected, rtol=0, atol=1e-12)


def test_half_a_step_goes_half_of_the_way() -> None:
    start, rows, _ = mixed(4, 4, LOSSLESS, graph="ring", consensus_step_size=0.5)
    matrix, expected = (np.eye(4) + Mixer(4, "ring").matrix(1)) / 2, start
    for step in range(4):
        expected = matrix @ expected
        np.testing.assert_allclose(rows[:, step], expected, rtol=0, atol=1e-12)


def test_a_replica_sends_its_message_to_each_neighbour_and_nothing_else() -> None:
    _, _, sent = mixed(4, 3, {"type": "onebit"}, graph=STAR)
    num_bytes = 2 * 8 + (144 + 21 + 7) // 8  # a scale for each of two tensors, and the bits
    for told, degree in zip(sent, [3, 1, 1, 1], strict=True):
        assert [step for step, _ in told] == [degree * num_bytes] * 3
        # What an average replica of six messages a step has saved is added to what this one has sent.
        saved = 1.5 * (165 * 8 - num_bytes)
        whole = [(degree * num_bytes + saved) * count for count in (1, 2, 3)]
        assert [dense for _, dense in told] == pytest.approx(whole, abs=0.5)


def test_messages_of_any_length_find_their_way() -> None:
    _, _, sent = mixed(3, 2, {"type": "threshold", "threshold": 0.5}, graph="ring")
    assert len({told[0][0] for told in sent}) > 1


def test_neighbours_that_change_are_refused() -> None:
    for gossip in ({"graph": "random"}, {"graph": "ring", "mixing": "push_sum"}):
        with pytest.raises(ConfigError, match="neighbours that stay the same"):
            make_exchange("gossip", compression={"type": "qsgd"}, **gossip)


# -- training ----------------------------------------------------------------------------------------------------------


def task() -> Any:
    return few_digits()


def gossiping(code: dict[str, Any], data: int, network: dict[str, Any] | None = None, **rest: Any) -> Any:
    exchange = {"type": "gossip", "graph": "ring", **rest.pop("exchange", {})}
    return replace(layout_settings({"data": data, **(network or {})}, exchange, **rest), compression=code)


@pytest.mark.parametrize("optimizer", [{"momentum": 0.0}, {"momentum": 0.9}])
def test_a_complete_graph_without_loss_is_the_single_process(optimizer: dict[str, Any]) -> None:
    chosen = {"optimizer": {"type": "sgd", "lr": 0.1, **optimizer}, "steps": 6}
    one = train_laid_out(task, layout_settings(**chosen))
    found = train_laid_out(task, gossiping(LOSSLESS, 3, exchange={"graph": "complete"}, **chosen))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


@pytest.mark.parametrize("code", CODES, ids=name_of)
def test_replicas_learn_from_fewer_bytes(code: dict[str, Any]) -> None:
    chosen: dict[str, Any] = {"steps": 25, "optimizer": {"type": "sgd", "lr": 0.3, "momentum": 0.9}}
    found = train_laid_out(lambda: digits(hidden=[16]), gossiping(code, 2, {"microbatches": 1}, **chosen))
    assert sum(found.losses[-5:]) < 0.75 * sum(found.losses[:5])
    assert found.outcome.bytes_sent < 0.35 * found.outcome.bytes_dense


def test_what_uncompressed_replicas_would_have_sent_is_told_also_where_some_have_more_neighbours() -> None:
    # What the first replica had saved stood for what each had: under this graph it has three times their neighbours.
    star = {"graph": {"edges": [[0, 1], [0, 2], [0, 3]]}}
    found = train_laid_out(task, gossiping({"type": "topk", "ratio": 0.1}, 4, exchange=star, steps=5))
    plain = train_laid_out(task, gossiping({"type": "none"}, 4, exchange=star, steps=5))
    assert found.outcome.bytes_sent < 0.5 * plain.outcome.bytes_sent
    assert found.outcome.bytes_dense == pytest.approx(plain.outcome.bytes_sent, rel=0.01)


def resumed(settings: Any, tmp_path: Path, *, first_steps: int) -> LaidOut:
    train_laid_out(task, replace(settings, steps=first_steps), checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))

    def load() -> Loaded:
        found = latest_good(tmp_path)[0]
        assert found is not None
        return Loaded(found)

    return train_laid_out(task, settings, load=load)


@pytest.mark.parametrize(("code", "data", "network"), [(CODES[0], 3, {}), (CODES[3], 2, {"tensor": 2})], ids=name_of)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, code: dict[str, Any], data: int, network: dict[str, Any]
) -> None:
    settings = gossiping(code, data, network, steps=5)
    whole = train_laid_out(task, settings)
    again = resumed(settings, tmp_path, first_steps=3)
    assert same_bits(again.weights, whole.weights)
    assert again.losses == pytest.approx(whole.losses[3:], rel=1e-14)


@pytest.mark.parametrize("code", [{"type": "onebit"}, {"type": "topk"}], ids=name_of)
def test_a_lost_peer_is_seen_by_all_as_a_lost_peer(code: dict[str, Any]) -> None:
    def run(collective: Collective) -> str:
        exchange = CompressedGossip(code, graph="ring")
        exchange.attach(Two(), collective)
        try:
            for step in range(1, 200):
                if step == 3 and collective.rank == 2:
                    collective.abort()
                    return "left"
                exchange.before_step(step)
                exchange.after_step(step)
        except PeerLostError:
            collective.abort()
            return "lost"
        return "finished"

    assert run_replicas(4, run) == ["lost", "lost", "left", "lost"]
