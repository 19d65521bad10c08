"""Any number of threads gives the same bits over many steps of changing size, and costs nothing while idle."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from octavo._native import Act, Epilogue, Form, Plan
from tests.native.harness import LEVELS, Array, Bench, Shape, make_weight

WIDTH, VOCAB = 64, 96


def deep_plan(threads: int, rows: int = 32, layers: int = 12) -> Plan:
    """Many small operations one after another, each needing all of the one before: tokens to logits of every row."""
    embedding = make_weight(Shape(Form.F32), VOCAB, WIDTH)
    matrices = [make_weight(Shape(Form.BF16), WIDTH, WIDTH, seed=i).packed for i in range(layers)]
    bench = Bench(LEVELS[-1], rows, threads, vocab=VOCAB, head_rows=8)
    hidden, normed = bench.slot(Act.F32, WIDTH), bench.slot(Act.BF16, WIDTH)
    last, logits = bench.slot(Act.F32, WIDTH), bench.slot(Act.F32, VOCAB)
    ones = np.ones(WIDTH, np.float32)

    def add(plan: Plan) -> None:
        plan.add_embed("embedding", embedding.packed, hidden.activation())
        for matrix in matrices:
            plan.add_norm("norm", hidden.activation(), WIDTH, ones, None, 1e-5, False, normed.activation())
            plan.add_linear("mix", matrix, normed.activation(), None, Epilogue.Add, hidden.activation(), WIDTH)
        plan.begin_head()
        plan.add_norm("last", hidden.activation(), WIDTH, ones, None, 1e-5, False, last.activation(), gather=True)
        plan.add_linear("head", embedding.packed, last.activation(), None, Epilogue.Store, logits.activation(), VOCAB)
        plan.set_logits(logits.activation())

    bench.add(add)
    return bench.plan


def many_steps(plan: Plan, steps: int) -> Array:
    """Logits of steps of 1 to 32 tokens, all one after another."""
    rng = np.random.default_rng(0)
    results = []
    for _ in range(steps):
        count = int(rng.choice([1, 2, 3, 7, 32]))
        plan.tokens[:count] = rng.integers(0, VOCAB, count)
        plan.counts[0] = count
        plan.logit_rows[:count] = np.arange(count)
        logits = np.empty((count, VOCAB), np.float32)
        plan.run(1, count, logits=logits)
        results.append(logits)
    return np.concatenate(results)


def test_many_steps_have_equal_bits_with_1_to_4_threads() -> None:
    steps = 1000
    expected = many_steps(deep_plan(1), steps).view(np.uint32)
    assert np.isfinite(expected.view(np.float32)).all()
    for threads in (2, 3, 4):
        np.testing.assert_array_equal(many_steps(deep_plan(threads), steps).view(np.uint32), expected)


def test_plans_of_their_own_run_at_the_same_time() -> None:
    expected = many_steps(deep_plan(1), 100).view(np.uint32)
    plans = [deep_plan(2) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda plan: many_steps(plan, 100), plans):
            np.testing.assert_array_equal(found.view(np.uint32), expected)


def test_python_goes_on_while_a_step_runs() -> None:
    """The interpreter's lock is not held: another thread's counter rises within one long step."""
    plan = deep_plan(2, rows=2048, layers=200)
    plan.counts[0] = 2048
    counter, stop = 0, threading.Event()

    def count() -> None:
        nonlocal counter
        while not stop.is_set():
            counter += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(1000):  # until the thread was seen to run between the start and the end of a step
            before = counter
            plan.run(1, 0)
            if counter > before + 10:
                break
    finally:
        stop.set()
        thread.join()
    assert counter > before + 10


def test_idle_workers_cost_next_to_nothing() -> None:
    plan = deep_plan(4)
    many_steps(plan, 10)
    process = psutil.Process()
    shares = []
    for _ in range(5):  # other parts of the process may have something to do, so the best of some tries counts
        before = sum(process.cpu_times()[:2])
        time.sleep(1)
        shares.append(sum(process.cpu_times()[:2]) - before)
        if shares[-1] < 0.05:
            break
    assert min(shares) < 0.05


def test_workers_end_with_their_plan() -> None:
    before = threads_of_the_process()
    plan = deep_plan(6)
    assert threads_of_the_process() == before + 5
    del plan
    assert threads_of_the_process() == before


def threads_of_the_process() -> int:
    return psutil.Process().num_threads()


@pytest.mark.parametrize("threads", [2, 4])
def test_plans_can_be_made_and_dropped_at_once(threads: int) -> None:
    """A pool ends well whatever its workers are doing: starting, lingering or asleep."""
    for i in range(30):
        plan = deep_plan(threads, layers=2)
        if i % 2:
            plan.counts[0] = 1
            plan.run(1, 0)
        if i % 10 == 9:
            time.sleep(0.002)
        del plan
