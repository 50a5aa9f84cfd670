"""All models of `conf/model` in one, with an output for each: one artefact and one compilation then
serve the tests of all of them.
"""

from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from recapp.metrics import LogLoss
from recapp.settings.records import find_constructor
from recapp.tasks.measures import Measure
from recapp.tasks.task import Output, Task


class ManyModels(nn.Module):
    """Models that share their collections; each gives the output of its name."""

    def __init__(self, models, dense_in_features, **collections):
        super().__init__()
        self.models = nn.ModuleDict()
        for name, settings in models.items():
            arguments = dict(settings)
            make = find_constructor(arguments.pop("_target_"), "model")
            needed = {each: collections[each] for each in arguments.pop("needs")}
            self.models[name] = make(**needed, dense_in_features=dense_in_features, **arguments)

    def forward(self, batch):
        """Return the logits of each model by name, each [B], and all that the models return."""
        found = {name: model(batch) for name, model in self.models.items()}
        logits = {n: each["logit"] if isinstance(each, dict) else each for n, each in found.items()}
        return logits | {"found": found}

    def extra_losses(self, outputs, batch, loss):
        """Return the losses that the models add."""

        def loss_of(found):
            logits_B = found["logit"] if isinstance(found, dict) else found
            return cross_entropy(logits_B, batch.labels_B)

        return {
            f"{name}_{key}": extra
            for name, model in self.models.items()
            if hasattr(model, "extra_losses")
            for key, extra in model.extra_losses(outputs["found"][name], batch, loss_of).items()
        }


class ManyTask(Task):
    """The label of clicks for every output."""

    def __init__(self, names=None, models=()):
        self.outputs = tuple(Output(name, column=f"{name}_score") for name in models)
        self.known = tuple(Measure(f"{n}_loss", f"{n} loss", "min", output=n) for n in models)
        self.best = f"{models[0]}_loss"
        super().__init__(names)

    def loss(self, outputs, batch):
        """Return the sum of the losses of all models."""
        label_B = batch.labels_B
        return sum(cross_entropy(each, label_B, reduction="sum") for each in outputs.values())

    def make_metric(self, name, sync_on_compute):
        """Return the log loss of an output."""
        return LogLoss(sync_on_compute=sync_on_compute)
