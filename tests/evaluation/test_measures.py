"""Perplexity and divergence are what torch computes, in pieces or at once."""

from __future__ import annotations

import math

import numpy as np
import torch

from octavo.evaluation.measures import Divergence, Likelihood, log_softmax


def test_figures_agree_with_torch_however_the_rows_come() -> None:
    rng = np.random.default_rng(0)
    expected = (rng.standard_normal((50, 40)) * 3).astype(np.float32)
    got = expected + rng.standard_normal((50, 40)).astype(np.float32) * 0.1
    targets = rng.integers(0, 40, 50)
    likelihood, divergence = Likelihood(), Divergence()
    for start in (0, 7, 30):
        stop = {0: 7, 7: 30, 30: 50}[start]
        rows, wanted = log_softmax(got[start:stop]), log_softmax(expected[start:stop])
        likelihood.add(rows, targets[start:stop])
        divergence.add(wanted, rows)
    p, q = torch.from_numpy(expected).double(), torch.from_numpy(got).double()
    loss = torch.nn.functional.cross_entropy(q, torch.from_numpy(targets), reduction="none")
    kl = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    found = likelihood.summary()
    assert found["tokens"] == 50
    assert math.isclose(found["perplexity"], loss.mean().exp().item(), rel_tol=1e-12)
    error = loss.std().item() / math.sqrt(50) * found["perplexity"]
    assert math.isclose(found["perplexity_error"], error, rel_tol=1e-9)
    compared = divergence.summary()
    assert math.isclose(compared["mean_kl"], kl.mean().item(), rel_tol=1e-9)
    assert math.isclose(compared["median_kl"], float(np.median(kl.numpy())), rel_tol=1e-9)
    assert math.isclose(compared["max_kl"], kl.max().item(), rel_tol=1e-9)
    assert compared["top1"] == (p.argmax(-1) == q.argmax(-1)).double().mean().item()


def test_a_model_does_not_diverge_from_itself() -> None:
    rows = log_softmax(np.random.default_rng(1).standard_normal((5, 9)).astype(np.float32))
    divergence = Divergence()
    divergence.add(rows, rows)
    assert divergence.summary()["mean_kl"] == 0
    assert divergence.summary()["top1"] == 1


def test_logits_of_any_size_are_no_trouble() -> None:
    rows = log_softmax(np.array([[1e30, 0, -1e30], [-1e38, -1e38, -1e38]], np.float32))
    assert rows[0, 0] == 0
    np.testing.assert_allclose(rows[1], -math.log(3))
