"""The form chosen for a linear holds the values of all its tensors, or is the one asked for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from octavo._native import Act, Form
from octavo.backends.cpu.forms import WeightForm, affine_rows, choose_form, is_lossy
from octavo.errors import ModelError
from octavo.quantization.rotation import rotate_rows
from octavo.weights.tensors import AffineTensor
from tests.backends.cpu.tensors import Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, Array, Kind, dense

PER_CHANNEL = Kind(8, 0, 128)
KINDS = {"Q4_0": Q4_0, "Q4_1": Q4_1, "Q8_0": Q8_0, "Q6_K": Q6_K, "Q4_K": Q4_K, "Q5_K": Q5_K, "int8": PER_CHANNEL}


def values(form: WeightForm, tensor: AffineTensor, start: int, stop: int) -> Array:
    """What rows mean in a form, in float64."""
    codes, scales, minimums = affine_rows(tensor, form, start, stop)
    group = form.group or tensor.shape[1]
    assert scales.shape == (stop - start, tensor.shape[1] // group)
    wide = np.repeat(scales.astype(np.float64), group, axis=1) * (codes.astype(np.float64) - form.zero)
    assert (minimums is not None) == form.minimum
    return wide if minimums is None else wide + np.repeat(minimums.astype(np.float64), group, axis=1)


@pytest.mark.parametrize(
    "names", [*itertools.combinations_with_replacement(KINDS, 2), ("Q4_1", "Q8_0", "Q6_K")], ids=str
)
def test_one_form_holds_tensors_of_different_types(names: tuple[str, ...]) -> None:
    tensors = [KINDS[name].tensor(20, 128, seed) for seed, name in enumerate(names)]
    form, read = choose_form(tensors, None)
    assert read == tensors
    assert form.form == (Form.W8 if any(tensor.bits == 8 for tensor in tensors) else Form.W4)
    for tensor in tensors:
        original = tensor.reader
        group = tensor.group
        exact = np.repeat(original.scales.astype(np.float64), group, axis=1) * (  # type: ignore[attr-defined]
            original.codes.astype(np.float64) - tensor.zero  # type: ignore[attr-defined]
        )
        if tensor.has_minimum:
            exact = exact + np.repeat(original.minimums.astype(np.float64), group, axis=1)  # type: ignore[attr-defined]
        found = values(form, tensor, 3, 17)
        np.testing.assert_array_equal(found, exact[3:17])
        if form.scale_f16:
            rows = affine_rows(tensor, form, 0, 20)
            for part in (rows.scales, *([] if rows.minimums is None else [rows.minimums])):
                np.testing.assert_array_equal(part.astype(np.float16).astype(np.float32), part)


@pytest.mark.parametrize("name", KINDS)
def test_a_tensor_alone_keeps_its_own_form(name: str) -> None:
    kind = KINDS[name]
    form, _ = choose_form([kind.tensor(4, 64)], None)
    assert (form.zero, form.minimum, form.scale_f16) == (kind.zero, kind.has_minimum, kind.scale_dtype == "f16")
    assert form.group == (kind.group or 64)
    assert not form.rotation


def test_groups_that_do_not_divide_each_other_are_refused() -> None:
    with pytest.raises(ModelError, match="do not divide each other"):
        choose_form([Kind(4, 64, 8).tensor(4, 192), Kind(4, 96, 8).tensor(4, 192)], None)


def test_groups_the_kernels_do_not_have_are_refused() -> None:
    with pytest.raises(ModelError, match="has groups of 48"):
        choose_form([Kind(4, 48, 8).tensor(4, 96)], None)


@pytest.mark.parametrize("quantization", [None, "none"])
def test_dense_tensors_and_mixtures_with_them_run_as_bf16(quantization: str | None) -> None:
    for tensors in ([dense(np.ones((4, 64)))], [dense(np.ones((4, 64))), Q4_0.tensor(4, 64)]):
        assert choose_form(tensors, quantization) == (WeightForm(Form.BF16), tensors)
    if quantization == "none":
        assert choose_form([Q4_0.tensor(4, 64)], quantization)[0] == WeightForm(Form.BF16)


def test_f32_takes_tensors_as_they_are() -> None:
    tensors = [dense(np.ones((4, 64))), Q4_0.tensor(4, 64)]
    assert choose_form(tensors, "f32") == (WeightForm(Form.F32), tensors)


def test_an_unknown_quantization_is_refused() -> None:
    with pytest.raises(ModelError, match="'w5' is not one of"):
        choose_form([dense(np.ones((4, 64)))], "w5")


@pytest.mark.parametrize("k", [64, 40, 48, 33])
@pytest.mark.parametrize("quantization", ["w8", "w4"])
def test_dense_tensors_are_rounded_when_asked_for_whatever_their_k(quantization: str, k: int) -> None:
    weights = np.random.default_rng(0).standard_normal((6, k)).astype(np.float32)
    form, (tensor,) = choose_form([dense(weights)], quantization)
    assert isinstance(tensor, AffineTensor)
    assert form.form == (Form.W8 if quantization == "w8" else Form.W4)
    assert form.rotation == (32 if quantization == "w8" and k % 32 == 0 else 0)
    assert form.nbytes(6, k) > 0  # a form the native library has
    found = values(form, tensor, 0, 6)
    expected = rotate_rows(weights) if form.rotation else weights
    step = np.abs(weights).max() / (100 if quantization == "w8" else 7)
    assert np.abs(found - expected).max() < step


@pytest.mark.parametrize(
    ("k", "piece", "group", "rotation"),
    [
        (576, 0, 192, 64),
        (2048, 0, 128, 64),
        (192 * 128, 0, 192, 64),
        (320, 0, 64, 64),
        (576, 64, 64, 64),
        (576, 96, 32, 32),
        (96, 0, 32, 32),
        (40, 0, 40, 0),
    ],
)
def test_wide_groups_divide_k_and_the_pieces_its_input_is_made_in(
    k: int, piece: int, group: int, rotation: int
) -> None:
    weights = np.random.default_rng(0).standard_normal((6, k)).astype(np.float32)
    form, (tensor,) = choose_form([dense(weights)], "w8-wide", piece)
    assert isinstance(tensor, AffineTensor)
    assert (form.form, form.group or k, form.rotation) == (Form.W8, group, rotation)
    expected = rotate_rows(weights, rotation) if rotation else weights
    assert np.abs(values(form, tensor, 0, 6) - expected).max() < np.abs(weights).max() / 100


@pytest.mark.parametrize("quantization", ["w8", "w8-wide"])
def test_quantised_tensors_keep_their_codes_when_wider_ones_are_asked_for(quantization: str) -> None:
    tensor = Q4_1.tensor(4, 64)
    form, (read,) = choose_form([tensor], quantization)
    assert isinstance(read, AffineTensor)
    assert (form.form, form.minimum, form.rotation) == (Form.W8, True, 0)
    np.testing.assert_array_equal(read.read(0, 4).codes, tensor.read(0, 4).codes)
    narrower, _ = choose_form([Q8_0.tensor(4, 64)], "w4")
    assert narrower.form == Form.W4


def test_a_mixture_of_dense_and_quantised_tensors_is_not_rotated() -> None:
    """All tensors of a linear share its activations, which are either rotated or not."""
    form, _ = choose_form([dense(np.ones((4, 64))), Q8_0.tensor(4, 64)], "w8")
    assert not form.rotation


@pytest.mark.parametrize(
    ("form", "activation"),
    [
        (WeightForm(Form.F32), (Act.F32, 32, 0)),
        (WeightForm(Form.BF16), (Act.BF16, 32, 0)),
        (WeightForm(Form.W8, 16, 128), (Act.I8, 16, 0)),
        (WeightForm(Form.W8, 32, 128, rotation=32), (Act.I8, 32, 32)),
        (WeightForm(Form.W8, 192, 128, rotation=64), (Act.I8, 192, 64)),
        (WeightForm(Form.W4, 128), (Act.I8, 32, 0)),
        (WeightForm(Form.W8, 0), (Act.I8, 32, 0)),
    ],
    ids=str,
)
def test_activations_fit_the_groups_of_the_weights(form: WeightForm, activation: tuple[Act, int, int]) -> None:
    assert form.activation == activation


def test_what_loses_is_known() -> None:
    bf16, w4 = WeightForm(Form.BF16), WeightForm(Form.W4, 32)
    ones = np.ones((4, 64))
    assert [is_lossy(dense(ones, dtype), bf16) for dtype in ("bf16", "f16", "f32")] == [False, True, True]
    assert not is_lossy(dense(ones), WeightForm(Form.F32))
    assert is_lossy(Q4_0.tensor(4, 64), bf16)
    assert not is_lossy(Q4_0.tensor(4, 64), w4)
    assert is_lossy(choose_form([dense(ones)], "w4")[1][0], w4)


def test_forms_have_names() -> None:
    names = [str(choose_form([kind.tensor(4, 64)], None)[0]) for kind in (Q4_0, Q4_1, Q6_K)]
    assert names == ["w4 group 32", "w4 group 32 affine", "w8 group 16"]
    assert str(choose_form([dense(np.ones((4, 64)))], "w8")[0]) == "w8 group 32 rotated"
    assert str(choose_form([dense(np.ones((4, 576)))], "w8-wide")[0]) == "w8 group 192 rotated"
    assert [str(choose_form([dense(np.ones((4, 64)))], q)[0]) for q in (None, "f32")] == ["bf16", "f32"]
