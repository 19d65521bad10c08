"""Routing and the products of experts equal numpy's in every form, and a row's bits do not depend on the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from octavo._native import Act, Elementwise, Epilogue, Form, Plan, Scoring
from tests.native.harness import (
    EPS,
    FORMS,
    LEVELS,
    WIDE_FORMS,
    Array,
    Bench,
    Quantized,
    Shape,
    Slot,
    Weight,
    linear_reference,
    make_weight,
    random_input,
    row_bits,
    to_bf16,
)
from tests.native.test_linear import activated, interleaved, tolerance

MAIN_FORMS = [FORMS[0], FORMS[1], FORMS[3], FORMS[9], WIDE_FORMS[1]]


@dataclass(frozen=True)
class Routes:
    """How rows choose experts."""

    experts: int = 12
    top_k: int = 3
    scoring: Scoring = Scoring.Softmax
    renormalize: bool = False
    scale: float = 1.0
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    pairs: bool = False

    def correction(self) -> Array | None:
        if not self.corrected:
            return None
        return np.random.default_rng(8).standard_normal(self.experts).astype(np.float32)

    def run(self, level: str, logits: Array) -> tuple[Array, Array]:
        """Weights and numbers of the experts of each row."""
        bench = Bench(level, len(logits))
        x, out = bench.slot(Act.F32, self.experts), bench.slot(Act.F32, 2 * self.top_k)
        bench.add(
            lambda plan: plan.add_route(
                "route",
                x.activation(),
                self.experts,
                self.top_k,
                self.scoring,
                self.renormalize,
                self.scale,
                self.correction(),
                self.groups,
                self.top_groups,
                self.pairs,
                out.activation(),
            )
        )
        x.write(logits)
        bench.run(len(logits))
        weights, numbers = np.split(out.read(len(logits)), 2, axis=1)
        return weights, numbers.astype(np.int64)

    def expected(self, row: Array) -> tuple[list[float], list[int]]:
        """The same for one row, in float64 and without vectors."""
        x = row.astype(np.float64)
        scores = {
            Scoring.Softmax: np.exp(x - x.max()) / np.exp(x - x.max()).sum(),
            Scoring.Sigmoid: 1 / (1 + np.exp(-x)),
            Scoring.SoftmaxOfChosen: x,
        }[self.scoring]
        correction = self.correction()
        choice = scores if correction is None else scores + correction
        size, best = self.experts // self.groups, 2 if self.pairs else 1
        worth = [sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(self.groups)]
        groups = sorted(range(self.groups), key=lambda g: -worth[g])[: self.top_groups]
        allowed = [e for e in range(self.experts) if e // size in groups]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: self.top_k]
        weights = scores[chosen]
        if self.scoring == Scoring.SoftmaxOfChosen:
            weights = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
        if self.renormalize:
            weights = weights / weights.sum()
        return list(weights * self.scale), chosen


@pytest.mark.parametrize(
    "routes",
    [
        Routes(),
        Routes(60, 4, renormalize=True, scale=1.5),
        Routes(5, 5),
        Routes(17, 1, Scoring.Sigmoid),
        Routes(32, 4, Scoring.SoftmaxOfChosen),
        Routes(160, 6, groups=8, top_groups=3, scale=16.0),
        Routes(256, 8, Scoring.Sigmoid, True, 2.5, True, 8, 4, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", LEVELS)
def test_routes_equal_numpy(level: str, routes: Routes) -> None:
    logits = np.random.default_rng(3).standard_normal((40, routes.experts)).astype(np.float32) * 3
    weights, numbers = routes.run(level, logits)
    for row, found, chosen in zip(logits, weights, numbers, strict=True):
        expected_weights, expected = routes.expected(row)
        assert chosen.tolist() == expected
        np.testing.assert_allclose(found, expected_weights, rtol=2e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_equal_scores_are_taken_in_the_order_of_experts(level: str) -> None:
    logits = np.zeros((2, 12), np.float32)
    logits[1, [7, 2, 9]] = 1
    _, numbers = Routes(top_k=4).run(level, logits)
    assert numbers.tolist() == [[0, 1, 2, 3], [2, 7, 9, 0]]
    _, numbers = Routes(top_k=3, groups=4, top_groups=2).run(level, logits)
    assert numbers.tolist() == [[0, 1, 2], [2, 7, 0]]


@pytest.mark.parametrize("level", LEVELS)
def test_logits_that_are_no_numbers_choose_experts_that_exist_and_pass_on(level: str) -> None:
    logits = np.full((3, 12), np.nan, np.float32)
    logits[1, 3:] = 1.0
    logits[2] = np.inf
    for routes in (Routes(), Routes(scoring=Scoring.Sigmoid, corrected=True, groups=3, top_groups=2, pairs=True)):
        weights, numbers = routes.run(level, logits)
        assert all(sorted(set(row)) == sorted(row) and 0 <= min(row) <= max(row) < 12 for row in numbers.tolist())
        assert np.isnan(weights[0]).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_sigmoid_gate_scales_whole_rows(level: str) -> None:
    bench = Bench(level, 5)
    x, gate, out = bench.slot(Act.F32, 37), bench.slot(Act.F32, 1), bench.slot(Act.F32, 37)
    bench.add(
        lambda plan: plan.add_elementwise(
            "gate", Elementwise.SigmoidGate, x.activation(), gate.activation(), 37, 1.0, out.activation()
        )
    )
    values = np.random.default_rng(0).standard_normal((5, 37)).astype(np.float32)
    gates = np.array([[-90.0], [-1.0], [0.0], [2.0], [90.0]], np.float32)
    x.write(values)
    gate.write(gates)
    bench.run(5)
    np.testing.assert_allclose(out.read(5), values / (1 + np.exp(-gates.astype(np.float64))), rtol=1e-6, atol=1e-30)


class Mixture:
    """A plan of one mixture: slots, and the weights of its experts."""

    def __init__(
        self,
        level: str,
        shape: Shape,
        rows: int,
        *,
        experts: int = 5,
        top_k: int = 2,
        k: int = 96,
        intermediate: int = 40,
        width: int = 70,
        biased: bool = False,
        activation: Epilogue = Epilogue.SiluMul,
        add: bool = False,
        scaled: bool = False,
        threads: int = 2,
    ) -> None:
        intermediate = shape.fitting(intermediate)
        self.top_k, self.width, self.intermediate, self.add = top_k, width, intermediate, add
        targets = interleaved(intermediate)
        self.ups = [make_weight(shape, len(targets), k, seed=e, targets=targets) for e in range(experts)]
        self.downs = [make_weight(shape, width, intermediate, seed=100 + e) for e in range(experts)]
        rng = np.random.default_rng(4)
        self.up_bias = rng.standard_normal((experts, 2 * intermediate)).astype(np.float32) * biased
        self.down_bias = rng.standard_normal((experts, width)).astype(np.float32) * biased
        self.activation = activation
        self.bench = Bench(level, rows, threads)
        self.route = self.bench.slot(Act.F32, 2 * top_k)
        self.x = shape.slot(self.bench, self.ups[0].packed.k)
        self.hidden = shape.slot(self.bench, intermediate, rows * top_k)
        self.out = self.bench.slot(Act.F32, width + 3)
        packed_up = np.zeros((experts, self.ups[0].packed.padded_columns), np.float32)
        packed_up[:, targets] = self.up_bias
        packed_down = np.zeros((experts, self.downs[0].packed.padded_columns), np.float32)
        packed_down[:, :width] = self.down_bias

        def build(plan: Plan) -> None:
            plan.add_experts(
                "experts",
                self.route.activation(),
                top_k,
                self.x.activation(),
                [weight.packed for weight in self.ups],
                packed_up.reshape(-1) if biased else None,
                activation,
                1.702,
                2.0,
                self.hidden.activation(),
                [weight.packed for weight in self.downs],
                packed_down.reshape(-1) if biased else None,
                add,
                self.out.activation(),
                width,
                scaled,
            )

        self.bench.add(build)

    def run(self, x: Array | Quantized, weights: Array, numbers: Array, residual: Array | None = None) -> Array:
        rows = len(weights)
        self.route.write(np.concatenate([weights, numbers.astype(np.float32)], axis=1))
        self.x.write_quantized(x) if isinstance(x, Quantized) else self.x.write(x)
        self.out.raw[:] = np.nan if residual is None else 7
        if residual is not None:
            self.out.raw[:rows, : self.width] = residual
        self.bench.run(rows)
        result: Array = self.out.read(rows)[:, : self.width]
        return result

    def gated(self, gate: Array, up: Array) -> Array:
        if self.activation == Epilogue.ClampedSiluMul:
            gate, up = np.minimum(gate, 2), np.clip(up, -2, 2)
            return (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        return activated(Epilogue.Silu, gate) * up


def picked(x: Array | Quantized, rows: Array) -> Array | Quantized:
    if isinstance(x, Quantized):
        return Quantized(x.codes[rows], x.scales[rows], x.scaled_sums[rows], x.sums[rows])
    return x[rows]


def times(x: Array | Quantized, factors: Array, shape: Shape) -> Array | Quantized:
    """Rows times a factor each, in the form that products read."""
    if isinstance(x, Quantized):
        return Quantized(x.codes, x.scales * factors, x.scaled_sums * factors, x.sums)
    return (to_bf16(x) if shape.form == Form.BF16 else x) * factors


def held(slot: Slot, rows: Array, count: int, columns: int) -> Array | Quantized:
    """Rows of a slot as what products read."""
    return picked(slot.read_quantized(count) if slot.form == Act.I8 else slot.read(count)[:, :columns], rows)


def random_routes(rows: int, experts: int, top_k: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    numbers = np.array([rng.permutation(experts)[:top_k] for _ in range(rows)])
    return rng.uniform(0.1, 1, (rows, top_k)).astype(np.float32), numbers


def random_rows(weight: Weight, rows: int) -> Array | Quantized:
    return random_input(weight, rows)


@pytest.mark.parametrize("shape", MAIN_FORMS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_experts_equal_numpy(level: str, shape: Shape) -> None:
    cases = [
        (1, False, Epilogue.SiluMul, False),
        (33, True, Epilogue.ClampedSiluMul, True),
        (300, False, Epilogue.SiluMul, True),
    ]
    for rows, biased, activation, add in cases:
        scaled = rows == 300
        mixture = Mixture(level, shape, rows, biased=biased, activation=activation, add=add, scaled=scaled)
        weights, numbers = random_routes(rows, 5, 2)
        if rows == 300:
            numbers[:250] = [1, 3]  # more rows than a tile of one expert has, and one that no row wants
            numbers[numbers == 4] = 0
            numbers[(numbers == 0).all(axis=1)] = [0, 2]
        x = random_rows(mixture.ups[0], rows)
        residual = np.random.default_rng(6).standard_normal((rows, mixture.width)).astype(np.float32) if add else None
        found = mixture.run(x, weights, numbers, residual)
        outside = mixture.out.read(rows)[:, mixture.width :]
        assert ((outside == 7) if add else np.isnan(outside)).all()
        order = np.argsort(numbers.reshape(-1), kind="stable")
        total = np.zeros((rows, mixture.width)) if residual is None else residual.astype(np.float64)
        allowed = EPS * np.abs(total)
        for expert in np.unique(numbers):
            places = np.flatnonzero(numbers.reshape(-1)[order] == expert)
            own = order[places] // 2
            scale = weights.reshape(-1)[order[places]][:, None]
            inputs = times(picked(x, own), scale, shape) if scaled else picked(x, own)
            product, magnitude = linear_reference(mixture.ups[expert], inputs)
            gate, up = np.split(product + mixture.up_bias[expert], 2, axis=1)
            hidden = held(mixture.hidden, places, rows * 2, mixture.intermediate)
            values = hidden.values() if isinstance(hidden, Quantized) else hidden
            expected = mixture.gated(gate, up)
            if not shape.rotation:  # a rotated row is checked by the product that undoes the rotation
                step = np.repeat(hidden.scales, shape.act_group, axis=1) if isinstance(hidden, Quantized) else 0
                coarse = step * 0.5001 + (2**-8 if shape.form == Form.BF16 else 1e-4) * (
                    1 + np.abs(pad_columns(expected, values))
                )
                assert (np.abs(values - pad_columns(expected, values)) <= coarse + 1e-3 * magnitude.max()).all()
            product, magnitude = linear_reference(mixture.downs[expert], hidden)
            scale = np.ones_like(scale) if scaled else scale
            np.add.at(total, own, scale * (product + mixture.down_bias[expert]))
            np.add.at(allowed, own, scale * (tolerance(mixture.downs[expert], magnitude) + 2 * EPS * np.abs(product)))
        error = np.abs(found - total)
        assert (error <= allowed + 4 * EPS * np.abs(total) + 1e-6).all(), (rows, error.max())


def pad_columns(values: Array, like: Array) -> Array:
    padded = np.zeros(like.shape)
    padded[:, : values.shape[1]] = values
    return padded


@pytest.mark.parametrize("shape", MAIN_FORMS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_bits_of_a_row_do_not_depend_on_the_batch_or_threads(level: str, shape: Shape) -> None:
    rows = 130
    weights, numbers = random_routes(rows, 5, 2)
    numbers[:100] = [4, 1]
    together = Mixture(level, shape, rows)
    x = random_rows(together.ups[0], rows)
    together.run(x, weights, numbers)
    expected = row_bits(together.out, rows)
    for threads, cuts in [(1, [1, 2, 7, 60, 130]), (3, [97, 98, 130])]:
        mixture = Mixture(level, shape, rows, threads=threads)
        start = 0
        for stop in cuts:
            own = np.arange(start, stop)
            mixture.run(picked(x, own), weights[own], numbers[own])
            assert [bits[: 4 * 70] for bits in row_bits(mixture.out, stop - start)] == [
                bits[: 4 * 70] for bits in expected[start:stop]
            ]
            start = stop


def test_wrong_arguments_are_refused() -> None:
    def build(**changes: int) -> None:
        arguments = {"experts": 5, "top_k": 2}
        _ = Mixture(LEVELS[-1], FORMS[0], 4, **{**arguments, **changes}).bench.plan

    build()
    with pytest.raises(ValueError, match="experts of a row"):
        build(top_k=6)
    with pytest.raises(ValueError, match="more experts to choose"):
        Routes(12, 5, groups=3, top_groups=1).run(LEVELS[-1], np.zeros((1, 12), np.float32))
    with pytest.raises(ValueError, match="groups of experts"):
        Routes(12, 2, groups=5).run(LEVELS[-1], np.zeros((1, 12), np.float32))


def test_numbers_outside_choose_nothing() -> None:
    """Only a route that no route operation made can hold them; they must not reach outside the weights."""
    mixture = Mixture(LEVELS[-1], FORMS[0], 3)
    numbers = np.array([[-1, 900], [np.nan, 5], [0, 1e30]])
    found = mixture.run(random_rows(mixture.ups[0], 3), np.ones((3, 2), np.float32), numbers)
    assert (found[:2] == 0).all()
    assert (found[2] != 0).any()
