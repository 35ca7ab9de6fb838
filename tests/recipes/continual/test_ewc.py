import pytest
import torch
from torch import nn

import toolkit as tk
from continual.ewc import ElasticWeights, fisher_information


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(tk.MLP(5, 4, 3)).double()


@pytest.mark.parametrize("classes", [None, (0, 2)])
def test_fisher_information_is_the_expected_square_of_each_samples_own_gradient(classes):
    model = small_model()
    inputs = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for sample in inputs:
        logits = model(sample[None])[0]
        log_probs = (logits if classes is None else logits[list(classes)]).log_softmax(0)
        for log_prob in log_probs:
            gradients = torch.autograd.grad(log_prob, list(model.parameters()), retain_graph=True)
            for total, gradient in zip(expected.values(), gradients, strict=True):
                total += log_prob.detach().exp() * gradient**2
    found = fisher_information(model, inputs, classes)
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total)
    assert all(p.grad is None for p in model.parameters())


def test_fisher_information_of_pieces_adds_up(monkeypatch):
    model, inputs = small_model(), torch.randn(7, 5, dtype=torch.float64)
    whole = fisher_information(model, inputs)
    monkeypatch.setattr("continual.ewc.AT_ONCE", 3)
    for name, total in fisher_information(model, inputs).items():
        torch.testing.assert_close(total, whole[name])


def test_layers_whose_information_would_be_wrong_are_refused():
    with pytest.raises(ValueError, match=r"'0\.weight' is not of a linear layer"):
        fisher_information(nn.Sequential(nn.Conv1d(1, 1, 3), nn.Linear(3, 2)), torch.randn(2, 1, 5))
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="one row per example"):
        fisher_information(nn.Sequential(layer, layer), torch.randn(2, 4))
    with pytest.raises(ValueError, match="one row per example"):
        fisher_information(nn.Sequential(nn.Linear(4, 4), nn.Flatten()), torch.randn(2, 3, 4))


def test_the_penalty_pulls_weights_back_in_proportion_to_their_importance():
    model = small_model()
    elastic = ElasticWeights(model, strength=6.0)
    assert elastic().item() == 0
    fisher = {name: torch.rand_like(p) for name, p in elastic.held.items()}
    elastic.consolidate(fisher)
    anchors = [p.detach().clone() for p in elastic.held.values()]
    with torch.no_grad():
        for parameter in elastic.held.values():
            parameter.add_(torch.randn_like(parameter))
    elastic().backward()
    for (name, parameter), anchor in zip(elastic.held.items(), anchors, strict=True):
        torch.testing.assert_close(parameter.grad, 6.0 * fisher[name] * (parameter.detach() - anchor))


def test_importance_adds_up_over_tasks_and_weights_are_held_where_they_were_last():
    model = small_model()
    elastic = ElasticWeights(model, strength=1.0)
    for _ in range(2):
        with torch.no_grad():
            next(iter(elastic.held.values())).add_(1)
        elastic.consolidate({name: torch.ones_like(p) for name, p in elastic.held.items()})
    assert all((importance == 2).all() for importance in elastic.importance)
    assert all(map(torch.equal, elastic.anchors, elastic.held.values()))
    assert "ewc_importance_0" in model.state_dict(), "so that checkpoints have it"
    assert len(list(model.parameters())) == 4, "and the optimizer has not"


def test_a_strength_that_pushes_weights_away_is_refused():
    with pytest.raises(ValueError, match="strength -1"):
        ElasticWeights(small_model(), -1.0)
