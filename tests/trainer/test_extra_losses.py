"""Losses that a model adds to that of its task."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tasks.task import ClickTask
from recapp.trainer.module import TaskModule


class Branches(nn.Module):
    """The mean of two branches; one of them also has a loss of its own."""

    def __init__(self, name="branch"):
        super().__init__()
        self.first = nn.Linear(2, 1)
        self.second = nn.Linear(2, 1)
        self.name = name

    def forward(self, batch):
        first_B, second_B = (f(batch.dense_BI).squeeze(1) for f in (self.first, self.second))
        return {"logit": (first_B + second_B) / 2, "first": first_B}

    def extra_losses(self, outputs, batch, loss):
        return {self.name: 2 * loss(outputs["first"])}


def module_of(model):
    module = TaskModule(ClickTask(), lambda: model, lambda parameters: None)
    module.configure_model()
    module._trainer = SimpleNamespace(
        accumulate_grad_batches=1,
        current_epoch=0,
        global_rank=0,
        global_step=0,
        log_every_n_steps=1,
    )
    module.logged = {}
    module.log = lambda name, value, **_: module.logged.update({name: float(value)})
    return module


@pytest.fixture
def batch():
    sparse = KeyedJaggedTensor(["C1"], torch.zeros(4).long(), lengths=torch.ones(4).long())
    return Batch(torch.randn(4, 2), sparse, torch.tensor([0.0, 1.0, 1.0, 0.0]))


def test_a_model_begins_on_the_cpu_whatever_device_is_at_work():
    """A GPU's generator draws other numbers, and a run should begin alike everywhere."""
    module = TaskModule(ClickTask(), Branches, lambda parameters: None, seed=7)
    with torch.device("meta"):  # as Lightning's strategies set theirs
        module.configure_model()
    torch.manual_seed(7)
    assert torch.equal(module.model.first.weight, nn.Linear(2, 1).weight)


def test_an_extra_loss_is_trained_and_logged_by_name_beside_the_loss_of_the_task(batch):
    model = Branches()
    module = module_of(model)
    loss = module.training_step(batch, 0)
    outputs = model(batch)
    own = module.task.loss({"logit": outputs["logit"]}, batch)
    extra = 2 * module.task.loss({"logit": outputs["first"]}, batch)
    assert torch.equal(loss, own + extra)
    assert module.logged == {"train_loss": own.item(), "train_branch": extra.item()}


def test_an_extra_loss_is_left_out_of_evaluation_and_prediction(batch):
    module = module_of(Branches())
    module.validation_step(batch, 0)
    logits_B = module.model(batch)["logit"]
    expected = module.task.loss({"logit": logits_B}, batch)
    assert module.val_metrics.compute()["log_loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert torch.equal(module.predict_step(batch, 0), logits_B.sigmoid())


@pytest.mark.parametrize(
    ("name", "says"),
    [("auc", "its extra loss auc has the name of a metric"), ("loss", "loss has the name of a")],
)
def test_an_extra_loss_with_the_name_of_a_metric_is_refused(name, says, batch):
    with pytest.raises(ConfigError, match=says):
        module_of(Branches(name)).training_step(batch, 0)


def test_an_extra_loss_that_is_no_single_number_is_refused(batch):
    model = Branches()
    model.extra_losses = lambda outputs, batch, loss: {"branch": outputs["first"]}
    with pytest.raises(ConfigError, match=r"its extra loss branch has shape \[4\]"):
        module_of(model).training_step(batch, 0)


def test_extra_losses_have_the_sample_weights_of_the_own_label_alone(batch):
    labels = {"clicked": batch.labels_B, "bought": batch.labels_B}
    weights = {"bought": torch.full((4,), 9.0)}
    several = Batch(batch.dense_BI, batch.sparse, labels, weights, torch.arange(4))
    found = ClickTask(label="clicked").with_own_weights(several)
    assert found.weights == {} and found.labels.keys() == labels.keys()
    assert torch.equal(found.row_numbers_B, torch.arange(4))
    assert ClickTask(label="bought").with_own_weights(several) is several
    assert ClickTask().with_own_weights(batch) is batch
