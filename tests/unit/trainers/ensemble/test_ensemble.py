"""The ensemble as a module: means of outputs of any structure, of probabilities, and reading it back from a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import CheckpointError, OrchestrayError
from orchestray.platform.run.checkpoint import save_model
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.core.members import (
    change_of_members,
    describe_members,
    first_member,
    saved_name,
    with_members,
)
from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.ensemble.answers import mean_over
from orchestray.trainers.ensemble.ensemble import Ensemble, class_dimension, mean_of
from orchestray.trainers.saved.run import load_run
from support.threads import run_replicas

CONFIG: dict[str, Any] = {
    "name": "a",
    "task": {"type": "digits", "hidden": [16]},
    "train": {"batch_size": 8, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
}


class Several(nn.Module):
    """A module whose answer is a structure."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"scores": [x * self.value], "more": (x + self.value, torch.tensor([3]), "text", None)}


def test_the_answer_is_the_mean_of_every_tensor_of_any_structure() -> None:
    x = torch.randn(4, 2)
    answer = Ensemble([Several(1.0), Several(2.0), Several(6.0)])(x)
    assert torch.allclose(answer["scores"][0], 3 * x)
    assert torch.allclose(answer["more"][0], x + 3)
    assert answer["more"][1:] == (torch.tensor([3]), "text", None)


def test_members_of_different_structures_have_no_mean() -> None:
    with pytest.raises(OrchestrayError, match="different structures"):
        mean_of([(torch.zeros(1),), [torch.zeros(1)]])


def test_an_ensemble_of_one_answers_as_its_member() -> None:
    member = nn.Linear(3, 2)
    x = torch.randn(5, 3)
    assert torch.equal(Ensemble([member])(x), member(x))
    with pytest.raises(ValueError, match="at least one"):
        Ensemble([])


@pytest.mark.parametrize("shape", [(5, 4), (5, 7, 4), (5, 4, 3, 3)])
def test_probabilities_are_means_of_softmax_over_the_classes_and_logits_give_them_back(shape: tuple[int, ...]) -> None:
    members = [nn.Identity(), nn.Tanh()]
    x = torch.randn(shape, dtype=torch.float64)
    dim = class_dimension(x)
    assert x.shape[dim] == 4
    ensemble = Ensemble(members, "probabilities")
    answer = ensemble(x)
    assert torch.allclose(answer, (x.softmax(dim) + x.tanh().softmax(dim)) / 2, rtol=0, atol=1e-15)
    assert torch.allclose(answer.sum(dim), torch.ones(()).double())
    assert torch.allclose(ensemble.logits(x).softmax(dim), answer, rtol=0, atol=1e-12)


def test_targets_tell_the_dimension_of_the_classes_where_a_rule_would_not() -> None:
    outputs = torch.zeros(5, 4, 7)
    assert class_dimension(outputs) == 2
    assert class_dimension(outputs, torch.zeros(5, 7)) == 1
    assert class_dimension(outputs, torch.zeros(5, 4)) == 2
    assert class_dimension(torch.zeros(5, 4, 4), torch.zeros(5, 4)) == 2


@pytest.mark.parametrize("average", ["outputs", "probabilities"])
def test_members_on_different_workers_answer_as_one_ensemble(average: Any) -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    members = [nn.Linear(4, 3).double() for _ in range(3)]

    def answer(group: Collective) -> Tensor:
        found = mean_over(group, {"a": members[group.rank](x), "n": torch.tensor([7])}, average)
        assert found["n"] == torch.tensor([7])
        tensor: Tensor = found["a"]
        return tensor

    answers = run_replicas(3, answer)
    with torch.no_grad():
        expected = Ensemble(members, average).logits(x)
    assert all(torch.equal(found, answers[0]) for found in answers)
    assert torch.allclose(answers[0], expected, rtol=0, atol=1e-14)


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_tensor_is_found_under_the_name_that_another_number_of_members_saved_it_with() -> None:
    assert saved_name("w", saved=0, wanted=0) == "w"
    assert saved_name("members.0.w", saved=0, wanted=0) == "members.0.w"
    assert saved_name("w", saved=3, wanted=0) == "members.0.w"
    assert saved_name("members.0.w", saved=2, wanted=0) == "members.0.members.0.w"
    assert saved_name("members.2.w", saved=0, wanted=3) == "w"
    assert saved_name("members.4.w", saved=3, wanted=5) == "members.1.w"
    assert saved_name("members.2.w.momentum", saved=3, wanted=3, shared=["w"]) == "members.0.w.momentum"
    assert first_member({"members.0.w": 1, "members.10.w": 2, "members.0.members.1.v": 3}) == {"w": 1, "members.1.v": 3}


@pytest.mark.parametrize(
    ("saved", "wanted", "said"),
    [(2, 0, "its member 0"), (0, 2, "all 2 members"), (3, 2, "the first 2"), (2, 4, "from 2 to 3 go on from copies")],
)
def test_a_change_of_members_is_said(saved: int, wanted: int, said: str) -> None:
    assert said in str(change_of_members(saved, wanted))
    assert change_of_members(saved, saved) is None


def test_metrics_of_members_are_listed_in_their_order() -> None:
    told = with_members({"loss": 1.0, "members.10.loss": 4.0, "members.2.loss": 3.0, "members.0.loss": 2.0})
    assert told == {"loss": 1.0, "members": [{"loss": 2.0}, {"loss": 3.0}, {"loss": 4.0}]}
    assert with_members({"loss": 1.0}) == {"loss": 1.0}


# -- a run's model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["outputs", "probabilities"])
def test_the_model_of_an_ensembles_run_holds_its_members_and_answers_with_their_mean(
    tmp_path: Path, average: Any
) -> None:
    source = TaskSource.from_config(load_train_config(CONFIG).task)
    trained = Ensemble([tasks.build(source).build_model().double() for _ in range(3)], average)
    described = {"task": source.to_json(), **describe_members(3, {"type": "independent", "average": average})}
    with RunDirectory.create(tmp_path, "a") as written:
        written.write_config(dump_yaml(load_train_config(CONFIG)))
        save_model(written.paths.model, model_tensors(trained), described)
    model = load_run(tmp_path / "a").load_model()
    assert isinstance(model, Ensemble)
    assert (len(model.members), model.average, model.training) == (3, average, False)
    x = torch.rand(4, 64, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(model(x), trained(x))
        assert torch.equal(model.members[2](x), trained.members[2](x))


def test_a_model_that_lacks_a_member_is_refused(tmp_path: Path) -> None:
    source = TaskSource.from_config(load_train_config(CONFIG).task)
    trained = Ensemble([tasks.build(source).build_model() for _ in range(2)])
    described = {"task": source.to_json(), **describe_members(3, {"average": "outputs"})}
    with RunDirectory.create(tmp_path, "a") as written:
        written.write_config(dump_yaml(load_train_config(CONFIG)))
        save_model(written.paths.model, model_tensors(trained), described)
    with pytest.raises(CheckpointError, match=r"missing: members\.2\.0\.weight"):
        load_run(tmp_path / "a").load_model()
